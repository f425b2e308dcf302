"""Norms: dims that statistics are taken over stay whole; what a backward keeps of them."""

from __future__ import annotations

import torch

from planner.language.ops.families.entries import normalization
from tests.ops.calls import kernel_call, offered, on_shard, saved
from tests.sharding.programs import one_op

ones = torch.ones


def batch_norm(*, training: bool, tracked: bool = True):
    running = (ones(4), ones(4)) if tracked else (None, None)
    args = (ones(2, 4), ones(4), ones(4), *running, training, 0.1, 1e-5, False)
    return one_op("aten.batch_norm.default", *args)


def test_a_row_is_normalised_by_itself():
    norm = one_op("aten.layer_norm.default", ones(2, 4, 6), [6], ones(6), ones(6))
    assert offered(norm) == {"S(0),R,R->S(0)", "S(1),R,R->S(1)"}
    kept = saved(norm)
    assert kept.tensors == ("x0", "x1", "x2")
    assert kept.extra_bytes == 2 * 8 * 4  # mean and reciprocal deviation of 8 rows


def test_samples_of_a_batch_norm_stay_together_in_training():
    """In training statistics are of the whole batch; running ones that move rest whole."""
    assert offered(batch_norm(training=True)) == {"S(1),S(0),S(0),R,R->S(1)"}
    assert "S(0),R,R,R,R->S(0)" in offered(batch_norm(training=False))
    ((target, args),) = on_shard(batch_norm(training=True), "S(1),S(0),S(0),R,R->S(1)")
    assert (target, args[-1]) == ("planner.batch_norm_by_channel", "tp")
    untracked = batch_norm(training=True, tracked=False)
    ((target, _),) = on_shard(untracked, "S(1),S(0),S(0)->S(1)")
    assert target == "aten.batch_norm.default"


def test_groups_of_channels_go_whole():
    norm = one_op("aten.group_norm.default", ones(2, 4, 6), 2, ones(4), ones(4))
    assert offered(norm) == {"S(0),R,R->S(0)", "S(1),S(0),S(0)->S(1)"}
    ((_, args),) = on_shard(norm, "S(1),S(0),S(0)->S(1)")
    assert args[1] == 1
    odd = one_op("aten.group_norm.default", ones(2, 3, 6), 3, ones(3), ones(3))
    assert offered(odd) == {"S(0),R,R->S(0)"}
    assert normalization._group_statistics(kernel_call(norm)).extra_bytes == 2 * 2 * 2 * 4
