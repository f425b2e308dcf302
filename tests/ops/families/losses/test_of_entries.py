"""Losses of entries: a shard's sum is a term, its mean too once it is scaled."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.call import Call
from planner.language.ops.families.losses import of_entries
from tests.ops.calls import offered, on_shard, saved
from tests.sharding.programs import one_op

MADE, WANTED = torch.ones(4, 8), torch.zeros(4, 8)


def test_a_mean_over_a_shard_is_scaled_and_a_sum_is_not():
    mean = one_op("aten.mse_loss.default", MADE, WANTED)
    assert offered(mean) == {"S(0),S(0)->P", "S(1),S(1)->P"}
    assert [t for t, _ in on_shard(mean, "S(0),S(0)->P")][1:] == ["aten.mul.Tensor"]
    total = one_op("aten.mse_loss.default", MADE, WANTED, 2)
    assert len(on_shard(total, "S(0),S(0)->P")) == 1
    each = one_op("aten.mse_loss.default", MADE, WANTED, 0)
    assert offered(each) == {"S(0),S(0)->S(0)", "S(1),S(1)->S(1)"}
    assert saved(mean).tensors == ("x0", "x1")


def test_the_reduction_is_found_where_a_loss_has_it():
    for target, args, expected in (
        ("aten.mse_loss.default", (MADE, WANTED, 2), 2),
        ("aten.binary_cross_entropy_with_logits.default", (MADE, WANTED, None, None, 0), 0),
        ("aten.kl_div.default", (MADE, WANTED), 1),
    ):
        single = one_op(target, *args)
        assert of_entries._reduction(Call(single.op, single.program.tensor, 2)) == expected


@pytest.mark.parametrize(("reduction", "expected"), [(0, "S(0),S(0)->S(0)"), (1, "S(0),S(0)->P")])
def test_losses_of_samples_are_terms_unless_they_are_given_each(reduction, expected):
    single = one_op("aten.soft_margin_loss.default", MADE, WANTED, reduction)
    call = Call(single.op, single.program.tensor, 2)
    assert [str(s) for s in of_entries.loss_of_samples(call)] == [expected]
