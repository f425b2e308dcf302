"""A rank's parts of what is stored, and errors of torch's checkpoints."""

from __future__ import annotations

import traceback
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from planner.language.layout.pieces import Piece
from planner.language.layout.placement import Shard
from planner.runtime.checkpoint.parts import dtype_name, local, whole_part
from planner.runtime.checkpoint.together import told_plainly


def test_a_whole_tensor_is_written_by_a_single_rank():
    tensor = torch.arange(6).view(2, 3)
    part = whole_part("model.frozen.table", tensor)
    assert part.holding.meta.fqn == "frozen.table"
    assert (part.holding.meta.dtype, part.piece.local_shape) == ("int64", (2, 3))
    (chunk,) = part.written()
    assert chunk.box == chunk.local == ((0, 2), (0, 3))
    assert list(whole_part("model.frozen.table", tensor, is_written=False).written()) == []


def test_a_number_is_a_part_and_so_is_a_tensor_of_no_elements():
    (chunk,) = whole_part("average_count", torch.zeros((), dtype=torch.int64)).written()
    assert chunk.box == ()
    (chunk,) = whole_part("model.none", torch.zeros(0, 3)).written()
    assert chunk.box == ((0, 0), (0, 3))


def test_each_chunk_is_written_by_a_single_one_of_those_that_hold_it(monkeypatch):
    monkeypatch.setattr(Piece.chunks, "__defaults__", (8,))  # a row of two fp32
    part = whole_part("model.w", torch.zeros(7, 2))
    written = [
        chunk.box
        for copy in range(3)
        for chunk in replace(part, holding=replace(part.holding, copies=3, copy=copy)).written()
    ]
    assert sorted(written) == [((row, row + 1), (0, 2)) for row in range(7)]


def test_a_piece_that_is_not_the_tensors_is_never_stored():
    part = whole_part("model.w", torch.zeros(4, 2))
    with pytest.raises(AssertionError, match=r"model\.w"):
        replace(part, piece=part.piece.cut(Shard(0), 2, 1))


def test_what_a_rank_has_of_a_tensor_is_outside_autograd():
    param = nn.Parameter(torch.ones(2))
    assert not local(param).requires_grad
    assert local(param).data_ptr() == param.data_ptr()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = DeviceMesh("cpu", torch.tensor([0]), _init_backend=False)
    cut = DTensor.from_local(torch.ones(2), alone, [Replicate()], run_check=False)
    assert type(local(cut)) is torch.Tensor
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_the_first_ranks_own_error_is_told_for_all():
    def failure(text):
        return OSError(text), traceback.StackSummary()

    with pytest.raises(OSError, match="disk is full") as caught, told_plainly():
        raise CheckpointException("of all", {3: failure("gone"), 1: failure("disk is full")})
    assert caught.value.__notes__ == ["on rank 1"]
    assert caught.value.__suppress_context__
    with pytest.raises(KeyError), told_plainly():
        raise KeyError("another")
