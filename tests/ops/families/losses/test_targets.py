"""The mean over targets of all ranks: a sum of a shard, divided by what all ranks count."""

from __future__ import annotations

import torch

from planner.language.layout.placement import OpSharding
from planner.language.ops.call import Call, Placed
from planner.language.ops.families.losses.targets import SUM, divided_by_count, has_plain_targets
from tests.sharding.programs import one_op

LABELS = torch.zeros(4, dtype=torch.long)


def call_of(*args) -> Call:
    single = one_op("aten.cross_entropy_loss.default", *args)
    return Call(single.op, single.program.tensor, 2)


def test_targets_are_plain_when_they_are_indices_without_weights():
    logits = torch.ones(4, 8)
    assert has_plain_targets(call_of(logits, LABELS))
    assert not has_plain_targets(call_of(logits, logits.softmax(1)))
    assert not has_plain_targets(call_of(logits, LABELS, torch.ones(8)))


def test_a_sum_is_divided_by_the_count_of_all_ranks():
    call = call_of(torch.ones(4, 8), LABELS)
    placed = Placed(call, OpSharding.parse("S(0),S(0)->P"), "dp")
    form = divided_by_count(placed, call.op, -100)
    part, mean = form.ops
    assert part.outputs == (form.tensors[0].name,) == mean.inputs[:1]
    assert (mean.target, mean.outputs, mean.args[2:]) == (
        "planner.divide_by_count",
        call.op.outputs,
        (-100, "dp"),
    )
    assert SUM == 2  # as ATen numbers reductions
