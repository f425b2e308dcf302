"""What records say is saved for backward, against what autograd really saves on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from costmodel.memory.saved import saved_tensors
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.op_cases import CASES
from tests.sharding.programs import OneOp

OTHER_ON_THE_CPU = {
    "rms_norm": "on the CPU it is computed by several ops, on a GPU by one",
    "attention": "with values of another size than queries the CPU has no fused kernel",
    "cross_entropy_smooth": "label smoothing saves a flag for each target besides",
    "sort_rows": "the order is counted with the op that puts rows back, which saves it too",
    "grouped_mm": "in fp64 the matrix of each row is saved, which the library's kernels do not",
    "argsort": "whole numbers need no gradient, though the sort inside saves its indices",
}
"""Cases whose saved bytes are counted otherwise than the CPU's kernels save them, and why."""


def really_saved_bytes(single: OneOp) -> int:
    """Run the op and add up the distinct storages that autograd packs."""
    program = single.program
    module = to_graph_module(program, {"tp": None}, torch.device("cpu"))
    values = [
        tensor.clone().detach().requires_grad_(program.tensor[name].requires_grad)
        for name, tensor in zip(program.inputs, single.inputs, strict=True)
    ]
    packed = []  # kept alive, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        module(*values)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    return sum(storages.values())


@pytest.mark.parametrize("case", sorted(set(CASES) - set(OTHER_ON_THE_CPU)))
def test_saved_bytes_are_autograds(case):
    """M16: to the byte, for every op that has a sharding rule."""
    torch.manual_seed(0)
    single = CASES[case](random.Random(case), 2)
    counted = saved_tensors(single.program, device_type="cpu", held_anyway=frozenset())
    assert counted.num_bytes == really_saved_bytes(single), single.op.target


@pytest.mark.parametrize("case", sorted(OTHER_ON_THE_CPU))
def test_what_is_counted_otherwise_differs(case):
    """An entry that no longer differs leaves the list."""
    torch.manual_seed(0)
    single = CASES[case](random.Random(case), 2)
    counted = saved_tensors(single.program, device_type="cpu", held_anyway=frozenset())
    assert counted.num_bytes != really_saved_bytes(single), single.op.target
