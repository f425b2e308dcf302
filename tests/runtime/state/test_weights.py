"""Pieces of a user's weights: cut by axis, by segment, and read from the module by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.errors import LayoutError, ModelError
from planner.language.graph import TensorMeta
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.placements import WHOLE as WHOLE_MODEL
from planner.language.layout.process_mesh import ProcessMesh
from planner.runtime.state.weights import constant, own_piece, shape_of

WHOLE = torch.arange(24.0).view(8, 3)


def mesh(tp: int, rank: int) -> SimpleNamespace:
    own = ProcessMesh(axes=("tp",), shape=(tp,), ranks=tuple(range(tp)))
    return SimpleNamespace(own=own, global_rank=rank)


def test_a_rank_has_its_piece_of_each_segment():
    """Query, key and value in one weight: a rank has some heads of each."""
    plain = own_piece(WHOLE, WHOLE_MODEL.on("tp", Shard(0)), mesh(2, 1), "w")
    assert torch.equal(plain, WHOLE[4:])
    segments = own_piece(WHOLE, WHOLE_MODEL.on("tp", Shard(0, 2)), mesh(2, 1), "w")
    assert torch.equal(segments, torch.cat([WHOLE[2:4], WHOLE[6:8]]))
    with pytest.raises(LayoutError, match="tp=3 does not divide dim 0 of w"):
        own_piece(WHOLE, WHOLE_MODEL.on("tp", Shard(0)), mesh(3, 0), "w")


def test_a_piece_is_a_copy_of_its_own():
    piece = own_piece(WHOLE, WHOLE_MODEL.on("tp", Shard(0)), mesh(2, 1), "w")
    assert torch.equal(piece, WHOLE[4:])
    assert piece.untyped_storage().nbytes() == piece.nbytes  # not the memory of the whole
    whole = own_piece(WHOLE, WHOLE_MODEL.on("tp", Replicate()), mesh(2, 1), "w")
    assert whole.data_ptr() != WHOLE.data_ptr()


def meta(name: str, *, kind="param", shape=(2,), dtype="float32", **fields) -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype=dtype, kind=kind, fqn=name, **fields)


def test_tensors_are_found_by_name_or_by_value():
    module = nn.Linear(2, 2)
    shape = shape_of(module, meta("weight"))
    assert shape.is_meta
    assert shape.shape == (2, 2)
    assert not shape.requires_grad
    made = meta("c", kind="constant", shape=(2, 1), data=(1.0, 2.0))
    assert torch.equal(constant(made), torch.tensor([[1.0], [2.0]]))
    with pytest.raises(ModelError, match="the model has no param 'head'"):
        shape_of(module, meta("head"))
