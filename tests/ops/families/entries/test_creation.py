"""Constants take the sizes of a shard; dropout draws its own numbers there."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.families.entries import creation
from tests.ops.calls import kernel_call, offered, on_shard, saved, view
from tests.sharding.programs import one_op

ones = torch.ones


def test_constants_are_made_in_the_size_of_the_shard():
    full = one_op("aten.full.default", [2, 4], 1.0)
    assert offered(full) == {"->S(0)", "->S(1)"}
    ((_, args),) = on_shard(full, "->S(1)")
    assert args == ((2, 2), 1.0)


@pytest.mark.parametrize("train", [True, False])
def test_dropout_draws_on_shards_and_does_nothing_in_evaluation(train):
    drop = one_op("aten.dropout.default", ones(2, 4), 0.5, train)
    assert ("P->P" in offered(drop)) is not train
    ((target, _),) = on_shard(drop, "S(0)->S(0)")
    assert (target == "planner.with_own_random_stream") is train
    assert (view(drop) is None) is train
    assert saved(drop, "cuda").extra_bytes == (8 if train else 0)  # a byte an entry
    assert saved(drop, "cpu").extra_bytes == (32 if train else 0)  # noise in the input's dtype
    assert creation._drop_probability(kernel_call(drop)) == (0.5 if train else 0.0)


def test_whole_channels_are_dropped():
    drop = one_op("aten.feature_dropout.default", ones(2, 4, 6), 0.5, True)
    assert offered(drop) == {"S(0)->S(0)", "S(1)->S(1)"}
