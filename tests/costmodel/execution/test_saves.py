"""What other runtimes save for a backward: fused kernels, gathered inputs, the logits of a loss."""

from dataclasses import replace
from functools import lru_cache

import pytest

from costmodel.cache import CostCache
from costmodel.execution import find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.rings import GATHERED, with_rings
from costmodel.execution.saves import saved_instead, with_sized_losses
from costmodel.table.kernels import load_rates
from costmodel.table.rows.rows import price_row
from planner.language.graph import Op, Program, Ref
from planner.language.layout.axes import Degrees
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.families.losses.cross_entropy import (
    SIZED_CROSS_ENTROPY,
    VOCAB_CROSS_ENTROPY,
)
from planner.language.ops.families.products.rings import RING
from planner.language.templates import Transformer, build_transformer
from planner.language.templates.splits import tp_layouts
from profiles import load_profile
from tests.costmodel.programs import CHAIN, program_of

HIDDEN, WIDE, TOKENS, VOCAB = 64, 96, 32, 256
MODEL = Transformer(
    layers=1, hidden=HIDDEN, heads=4, kv_heads=4, ffn_hidden=WIDE, vocab=VOCAB, seq_len=TOKENS
)  # fmt: skip
BASE = replace(
    find_execution("megatron-core"),
    **dict.fromkeys(("fused_saves", "regathers", "attention_copies", "weighs_inside"), False),
    loss_bytes=14,
)


@lru_cache
def costs_of(**said: bool | int) -> CostCache:
    profile = load_profile("h100-sxm5-80gb")
    rates, execution = load_rates(profile), replace(BASE, **said)
    executed = ExecutedProfile(profile, rates, num_nodes=1, execution=execution)
    return CostCache(build_transformer(MODEL), executed, execution=execution)


def kept(of_class: int, *, tp: int = 1, **said: bool | int) -> int:
    """Bytes that a block of one sample keeps for its backward."""
    layouts = (tp_layouts(MODEL, sequence_parallel=True)[of_class],) if tp > 1 else ()
    costs, degrees = costs_of(**said), Degrees(tp=tp)
    return costs.block_bytes(of_class, 1, degrees, layouts).kept_bytes


def test_a_fused_gated_activation_saves_what_it_takes() -> None:
    """Not the silu of the gate, which the product with it would need: 2 bytes an element."""
    assert kept(1) - kept(1, fused_saves=True) == 2 * TOKENS * WIDE


def test_gathered_inputs_of_products_are_saved_as_parts() -> None:
    """Of attention's and of the feed-forward's first product, on 2 ranks half of each. The part
    is the norm's result, which nothing else keeps.
    """
    assert kept(1, tp=2) - kept(1, tp=2, regathers=True) == 2 * TOKENS * HIDDEN * 2 // 2
    assert kept(1) == kept(1, regathers=True)


@pytest.mark.parametrize("bytes_per_logit", [6, 12, 14])
def test_a_loss_takes_as_many_bytes_of_a_logit_as_its_record_says(bytes_per_logit: int) -> None:
    costs = costs_of(loss_bytes=bytes_per_logit)
    layouts = (tp_layouts(MODEL, sequence_parallel=True)[2],)
    rise = costs.block_bytes(2, 1, Degrees(tp=2), layouts).forward_rise_bytes
    logits = TOKENS * VOCAB // 2
    # Beside them the norm's result, gathered and in parts, and a few bytes of each token.
    assert rise / logits == pytest.approx(bytes_per_logit, abs=3 * 2 * HIDDEN / (VOCAB // 2))
    least = costs_of(loss_bytes=6).block_bytes(2, 1, Degrees(tp=2), layouts).forward_rise_bytes
    assert rise - least == (bytes_per_logit - 6) * logits


def test_our_own_runtime_saves_what_autograd_does() -> None:
    """Its record is not read: the profile's prices are for the program as it runs."""
    profile = load_profile("h100-sxm5-80gb")
    own = CostCache(build_transformer(MODEL), profile).block_bytes(1, 1).kept_bytes
    assert own == kept(1)


NOTHING = replace(BASE, kernels="fused")


def test_a_fused_kernel_makes_what_is_inside_of_it_again():
    """Of what it takes from outside; a product, alone, of its factors."""
    program = program_of(CHAIN, outputs=("d",))
    again = saved_instead(program, replace(NOTHING, fused_saves=True))
    assert again["a"] == again["b"] == {"a": ("x",), "b": ("x", "y")}
    assert again["c"] == again["d"] == {"c": ("p", "b"), "d": ("p", "b")}
    assert again["p"] == {"p": ("b", "w")}
    assert not any(saved_instead(program, NOTHING).values())


def gathered_for(*products: str, axis: str = "tp") -> Program:
    """x, split on an axis, is gathered for products."""
    program = program_of(
        {"g": ("aten.neg.default", ("x",))}
        | dict.fromkeys(products, ("aten.mm.default", ("g", "w"))),
        outputs=products,
    )
    gather = Op(
        name="g",
        target=REDISTRIBUTE,
        args=(Ref("x"), axis, "S(0)", "R", True),
        outputs=("g",),
    )
    return replace(program, ops=(gather, *program.ops[1:]))


def test_gathered_inputs_are_saved_as_what_they_were_gathered_from():
    program = gathered_for("p", "q")
    regathers = replace(NOTHING, regathers=True)
    again = saved_instead(program, regathers)
    assert {name: parts for name, parts in again.items() if parts} == {
        "p": {"g": ("x",)},
        "q": {"g": ("x",)},
    }
    ours = replace(regathers, prices="profile")
    assert saved_instead(program, ours) == {}


def test_only_a_loss_over_parts_of_the_vocabulary_is_given_a_size():
    program = program_of({"loss": (VOCAB_CROSS_ENTROPY, ("x", "y"))}, outputs=("loss",))
    (op,) = with_sized_losses(program, 6).ops
    assert (op.target, op.kwargs) == (SIZED_CROSS_ENTROPY, (("bytes_per_logit", 6),))
    other = program_of(CHAIN, outputs=("d",))
    assert with_sized_losses(other, 6) is other


def attention_of(axis: str, *others_read: str) -> Program:
    """Keys and values are gathered on an axis before attention; others may read them, too."""
    ops = dict.fromkeys(("k", "v", "out"), ("aten.neg.default", ("x",)))
    more = {f"n{at}": ("aten.neg.default", (read,)) for at, read in enumerate(others_read)}
    program = program_of(ops | more, outputs=("out", *more), inputs=("x",), params=())
    gathers = tuple(
        Op(
            name=name,
            target=REDISTRIBUTE,
            args=(Ref("x"), axis, "S(2)", "R", True),
            outputs=(name,),
        )
        for name in ("k", "v")
    )
    attention = Op(
        name="out",
        target=GATHERED,
        args=(Ref("x"), Ref("k"), Ref("v"), 0.1, 0.5, True),
        outputs=("out",),
    )
    return replace(program, ops=(*gathers, attention, *program.ops[3:]))


def test_a_ring_takes_the_parts_of_keys_and_values():
    (op,) = with_rings(attention_of("cp"), 4).ops
    assert op.target == RING
    dealt = (0, None, None, 0.5, True, None, None, 0, (0, 1, 2, 3), 4, "cp")
    assert op.args == (Ref("x"), Ref("x"), Ref("x"), *dealt)
    assert {meta.name for meta in with_rings(attention_of("cp"), 4).tensors} == {"x", "out"}


def test_what_others_read_is_gathered_beside_a_ring():
    program = with_rings(attention_of("cp", "k", "v"), 4)
    assert [op.outputs[0] for op in program.ops] == ["k", "v", "out", "n0", "n1"]
    assert program.ops[2].target == RING
    assert program.ops[2].inputs == ("x", "x", "x")


def test_keys_that_nothing_gathers_over_cp_go_round_no_ring():
    """Each rank has them whole, or with those of the other ranks of tp."""
    program = attention_of("tp")
    assert with_rings(program, 4) == program


def test_attention_that_is_not_fused_saves_its_weights_once() -> None:
    """Transformer Engine's softmax saves what it makes, as the product with the values does."""
    row = {
        "stack": "megatron-core", "gpu": "H100", "layers": "2", "hidden": "256", "heads": "8",
        "seq_len": "4096", "vocab": "1024", "gpus": "1", "micro_batch": "1", "global_batch": "1",
        "recompute": "none", "tied": "0", "bias": "0", "dropout": "0",
    }  # fmt: skip
    fused, unfused = (
        price_row({**row, "attention": kind}).predicted["predicted_peak_mem_gib"]
        for kind in ("fused", "unfused")
    )
    weights_gib = 2 * 8 * 4096**2 * 2 / 2**30
    # Beside what layers save, a backward has gradients of a layer's scores.
    assert weights_gib < unfused - fused < 2.5 * weights_gib
