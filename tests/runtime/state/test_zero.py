"""What FSDP2 is told before each backward, by ZeRO stage."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from planner.language.layout.placement import Replicate, Shard
from planner.runtime.state.zero import before_backward, torch_placement


@pytest.mark.parametrize(
    ("zero_stage", "is_last", "reduces", "reshards"),
    [
        (1, False, False, False),  # gradients stay whole until the last microbatch
        (1, True, True, True),
        (2, False, True, False),  # shards of gradients; parameters stay gathered
        (2, True, True, True),
        (3, False, True, True),  # nothing stays whole
        (3, True, True, True),
    ],
)
def test_what_is_reduced_and_resharded(zero_stage, is_last, reduces, reshards):
    stage = Mock(spec=FSDPModule)
    before_backward(stage, zero_stage, is_last=is_last)
    stage.set_requires_gradient_sync.assert_called_once_with(reduces)
    stage.set_reshard_after_backward.assert_called_once_with(reshards)
    stage.set_is_last_backward.assert_called_once_with(is_last)


def test_placements_as_dtensor_has_them():
    assert torch_placement(Shard(1)) == TorchShard(1)
    assert torch_placement(Replicate()) == TorchReplicate()
