"""Counted saved activations against what autograd really saves."""

import pytest
import torch

from costmodel.memory.block.backward_facts import passes_on
from costmodel.memory.block.block_bytes import block_bytes, block_load
from costmodel.memory.saved import saved_tensors
from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.language.lowering.lowering import ONCE
from planner.runtime.stage.program_fx import to_graph_module
from tests.builders import tiny_models
from tests.captures import capture_module

CPU = torch.device("cpu")


def value(meta: TensorMeta) -> torch.Tensor:
    dtype, shape = getattr(torch, meta.dtype), meta.shape_at(1)
    if meta.data is not None:
        return torch.tensor(meta.data, dtype=dtype).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype).requires_grad_(meta.requires_grad)
    return (
        torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.zeros(shape, dtype=dtype)
    )


def really_saved_bytes(program: Program) -> int:
    """Run the program's forward and add up the distinct storages autograd packs."""
    module = to_graph_module(program, {"tp": None}, CPU)
    names = (*program.inputs, *program.params)
    values = [value(program.tensor[name]) for name in names]
    held = {
        v.untyped_storage().data_ptr()
        for name, v in zip(names, values, strict=True)
        if program.tensor[name].kind != "activation"
    }
    packed = []  # kept alive, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        module(*values)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in held)


LONG = {"hf-mixtral", "hf-t5", "hf-qwen3"}
"""Models that take seconds to capture; the others cover the same rules but routing's."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in tiny_models()],
)
def test_saved_bytes_equal_autograds(name):
    """M16: every block class of every test model, to the byte."""
    model = tiny_models()[name]
    if model.needs_transformers:
        pytest.importorskip("transformers")
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    for program in (c.bind(2) for c in graph.classes):
        counted = saved_tensors(program, device_type="cpu")
        assert counted.num_bytes == really_saved_bytes(program), program.name


def test_views_of_one_storage_count_once():
    """Query, key and value cut out of one projection keep that projection once."""
    model = tiny_models()["hf-gpt2"]
    pytest.importorskip("transformers")
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt2")
    layer = max(graph.classes, key=lambda c: len(c.ops)).bind(2)
    saved = saved_tensors(layer, device_type="cpu")
    attention = next(op for op in layer.ops if "attention" in op.target)
    storages, _ = saved.by_op[attention.name]
    roots = {saved.storages.storage[name].root for name in attention.inputs[:3]}
    assert len(roots) == 1
    assert sum(s.root in roots for s in storages) == 1


def test_a_block_keeps_all_that_its_ops_save():
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    layer = max(graph.classes, key=lambda c: len(c.ops)).bind(2)
    block = block_bytes(layer, device_type="cpu", recompute="none", recomputed=frozenset())
    saved, load = block.saved, block_load(block, ())
    assert saved.num_bytes == load.saved_bytes + load.side_bytes
    inputs_bytes = sum(layer.tensor[name].bytes_at(1) for name in saved.inputs)
    assert block.forward_rise_bytes >= saved.num_bytes - inputs_bytes


def test_a_gradient_counted_once_copies_nothing_forward():
    """What holds its argument holds its result; zeros come back on all ranks but the first."""
    made = [
        TensorMeta(name=n, shape=(4, 4), dtype="float32", kind="activation", requires_grad=True)
        for n in ("w", "once")
    ]
    once = Op(name="once", target=ONCE, args=(Ref("w"), "cp"), outputs=("once",))
    program = Program(
        name="p", inputs=("w",), params=(), outputs=("once",), tensors=tuple(made), ops=(once,)
    )
    saved = saved_tensors(program)
    assert saved.storages.storage["once"].root == "w"
    assert saved.num_bytes == 0
    assert not passes_on(once, 0, saved.storages)
