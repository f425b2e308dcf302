"""What a compiled block's backward holds: kernels as one step each, and products at the end."""

from dataclasses import replace

import pytest

from costmodel.memory.block.block_bytes import block_bytes
from costmodel.memory.block.fused_facts import compiled_facts, made_late
from costmodel.memory.saved import saved_tensors
from planner.language.ops.weight_products import deferrable_products
from tests.costmodel.programs import program_of

SIZE = 32 * 32 * 4
"""Bytes of each tensor."""
LAYER = {
    "a": ("aten.mm.default", ("x", "w")),
    "b": ("aten.gelu.default", ("a",)),
    "c": ("aten.mul.Tensor", ("b", "b")),
    "d": ("aten.mm.default", ("c", "v")),
}
AGAIN = frozenset({"b", "c"})


def layer():
    return program_of(LAYER, inputs=("x",), params=("w", "v"), outputs=("d",))


def held(recompute, *, is_compiled):
    return block_bytes(
        layer(),
        device_type="cpu",
        recompute=recompute,
        recomputed=AGAIN,
        is_compiled=is_compiled,
    )


def test_a_kernel_is_one_step_that_makes_what_others_read():
    """gelu and mul fuse: of a's, b's and c's gradients the kernel takes c's and makes a's."""
    saved = saved_tensors(layer(), device_type="cpu")
    facts = compiled_facts(saved, deferrable_products(layer()), (), saved.roots)
    assert [step.op.name for step in facts.ops] == ["d", "b", "a"]
    kernel = facts.ops[1]
    assert kernel.op.outputs == ("c",)
    assert [(g.name, g.num_bytes) for g in kernel.gradients] == [("a", SIZE)]
    assert {root for root, _ in kernel.saved} == {"a", "b"}


def test_gradients_inside_a_kernel_have_no_memory():
    """By hand, later microbatches: c's gradient is the only rise; the kernel writes a's over it,
    and when x's is made a and b are gone. Op by op v's gradient is there beside c's.
    """
    compiled, eager = (held("none", is_compiled=is_compiled) for is_compiled in (True, False))
    assert compiled.kept_bytes == eager.kept_bytes == 3 * SIZE  # a, b, c
    assert compiled.backward(first=False).rise_bytes == SIZE
    assert eager.backward(first=False).rise_bytes == 2 * SIZE


def test_what_kernels_make_again_is_theirs_alone():
    """b lies in no memory; c, a factor of v's gradient, from its kernel on; a is what is kept."""
    saved = saved_tensors(layer(), device_type="cpu")
    late = made_late(saved, deferrable_products(layer()), AGAIN)
    assert (late.inside, late.factors) == (frozenset({"b"}), {"c": "c"})
    block = held("selective", is_compiled=True)
    assert block.kept_bytes == SIZE
    assert block.recomputed_bytes == 0
    # c's gradient, and c itself.
    assert block.backward(first=False).rise_bytes == 2 * SIZE


GATED = {
    "up": ("aten.mm.default", ("x", "w")),
    "act": ("aten.silu.default", ("up",)),
    "gate": ("aten.mm.default", ("x", "v")),
    "mul": ("aten.mul.Tensor", ("act", "gate")),
    "down": ("aten.mm.default", ("mul", "u")),
}


def test_a_kernel_runs_ahead_of_products_between_its_ops():
    """silu and mul are one kernel, which makes the gradients of both products: the weight of the
    product between them has a gradient as all others do.
    """
    program = program_of(GATED, inputs=("x",), params=("w", "v", "u"), outputs=("down",))
    saved = saved_tensors(program, device_type="cpu")
    facts = compiled_facts(saved, deferrable_products(program), (), saved.roots)
    assert [step.op.name for step in facts.ops] == ["down", "act", "gate", "up"]
    block = block_bytes(
        program, device_type="cpu", recompute="none", recomputed=frozenset(), is_compiled=True
    )
    assert block.backward(first=True).made == {"w", "v", "u"}


def test_a_compiled_forward_has_nothing_between_ops_of_a_kernel():
    """By hand: a product, and three ops on its result that nothing saves but the last two."""
    program = program_of(
        {
            "a": ("aten.mm.default", ("x", "w")),
            "b": ("aten.neg.default", ("a",)),
            "c": ("aten.neg.default", ("b",)),
            "d": ("aten.neg.default", ("c",)),
        },
        inputs=("x",),
        params=("w",),
        outputs=("d",),
    )
    rises = [
        block_bytes(
            program, device_type="cpu", recompute="none", recomputed=frozenset(), is_compiled=kind
        ).forward_rise_bytes
        for kind in (False, True)
    ]
    assert rises == [2 * SIZE, 2 * SIZE]  # op by op two at a time; the kernel's input and result


def loss_of_a_divided_vocabulary():
    call = ("planner.vocab_cross_entropy", ("cast", "y"))
    return program_of(
        {"a": ("aten.mm.default", ("x", "w")), "cast": ("aten.neg.default", ("a",)), "loss": call},
        inputs=("x", "y"),
        params=("w",),
        outputs=("loss",),
    )


def test_a_loss_of_a_divided_vocabulary_is_one_kernel_with_what_is_ahead_of_it():
    """The kernel takes the product's result, saves probabilities, and makes the gradient of that
    result: what stands between has no memory.
    """
    program = loss_of_a_divided_vocabulary()
    saved = saved_tensors(program, device_type="cpu")
    facts = compiled_facts(saved, deferrable_products(program), (), saved.roots)
    assert [step.op.name for step in facts.ops] == ["cast", "a"]
    assert [g.name for g in facts.ops[0].gradients if g.name != "y"] == ["a"]
    assert facts.ops[0].scratch_bytes == 0


AHEAD = {
    "a": ("aten.mm.default", ("x", "w")),
    "b": ("aten.silu.default", ("a",)),
    "c": ("aten.mul.Tensor", ("b", "a")),
    "d": ("aten.mm.default", ("c", "y")),
}


def test_what_is_made_again_for_others_leaves_what_is_on_the_way():
    """c is a factor of y's gradient, made ahead of the kernel's own backward, which reads b: no
    kernel makes b twice. By a weight's product alone it would be the kernel's own.
    """
    program = program_of(AHEAD, inputs=("x", "y"), params=("w",), outputs=("d",))
    saved = saved_tensors(program, device_type="cpu")
    late = made_late(saved, deferrable_products(program), AGAIN)
    assert (late.inside, late.factors) == (frozenset(), {})


NORMED = {
    "a": ("aten.mm.default", ("x", "w")),
    "b": ("aten.add.Tensor", ("a", "x")),
    "c": ("aten.mul.Tensor", ("b", "scale")),
    "d": ("aten.mm.default", ("c", "v")),
}


@pytest.mark.parametrize("again", [frozenset(), frozenset({"b", "c"})], ids=("kept", "again"))
def test_sums_of_what_is_made_again_are_late(again):
    """The gradient of a scale is a sum: made again, what it is a sum of stays to the end. What goes
    on to a and x is another sum, with what arrives for b: the first of both has memory of its own.
    """
    program = program_of(NORMED, inputs=("x",), params=("w", "scale", "v"), outputs=("d", "b"))
    tensors = [replace(t, shape=t.shape[1:]) if t.name == "scale" else t for t in program.tensors]
    program = replace(program, tensors=tuple(tensors))
    saved = saved_tensors(program, device_type="cpu")
    facts = compiled_facts(saved, deferrable_products(program), again, saved.roots)
    (kernel,) = [step for step in facts.ops if step.is_kernel]
    assert kernel.sums_late is bool(again)
    sources = {gradient.name: gradient.source for gradient in kernel.gradients}
    assert {sources["a"], sources["x"]} in ({"", "a"}, {"", "x"})
