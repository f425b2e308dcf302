"""Collectives as ops: what comes out of them, on fake tensors and on real ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    parse_placement,
)
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.ops.call import local_shape
from planner.runtime.process.collectives import redistribute, run_step
from planner.runtime.process.groups.mesh import default_group
from planner.runtime.stage.calls import local_ops
from planner.runtime.state.weights import read
from tests.sharding.programs import place, whole
from tests.sharding.ranks import on_ranks
from tests.spawn import run_ranks

SHAPE = (4, 6, 8)
PLACEMENTS = ("R", "P", "S(0)", "S(1)", "S(2)", "S(2)x2", "S(0)z2", "S(2)z2")
CHANGES = [
    (src, dst, grad_partial)
    for src in PLACEMENTS
    for dst in PLACEMENTS
    for grad_partial in ([False, True] if dst == "R" else [False])
]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "pad", "keep_first")

Described = list[tuple[tuple[int, ...], str, tuple[int, ...], str]]


def shapes_of_every_change() -> Described:
    """Shape and dtype of the value and of the gradient of each redistribution."""
    found = []
    for src, dst, grad_partial in CHANGES:
        local = local_shape(SHAPE, parse_placement(src), dist.get_world_size())
        x = torch.ones(local, dtype=torch.bfloat16, requires_grad=True)
        y = redistribute(x, default_group().group_name, src, dst, grad_partial)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        found.append((tuple(y.shape), str(y.dtype), tuple(x.grad.shape), str(x.grad.dtype)))
    for kind in KINDS:
        y = run_step(torch.ones(SHAPE), default_group().group_name, (kind, 0, 2))
        found.append((tuple(y.shape), str(y.dtype), (), ""))
    x = torch.ones(SHAPE)
    dist.broadcast(x, src=0)
    return [*found, (tuple(x.shape), str(x.dtype), (), "")]


def test_fake_shapes_are_real_shapes():
    """M1: every change of placement, forward and backward, and each collective alone."""
    real = run_ranks(shapes_of_every_change, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = shapes_of_every_change()
    assert real == [fake, fake]
    for (src, dst, _), (shape, _, grad_shape, _) in zip(CHANGES, fake, strict=False):
        assert shape == local_shape(SHAPE, parse_placement(dst), 2)
        assert grad_shape == local_shape(SHAPE, parse_placement(src), 2)


MIRRORED = ("R", "P", "S(0)", "S(2)", "S(1)x3", "S(0)z2", "S(1)z2", "S(2)z2", "S(1)z4")


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_and_gradients_of_every_change(ranks):
    """Between mirrored segments, which no rank has side by side, and all else."""
    torch.manual_seed(0)
    tensor, above = torch.randn(2, 12, 72, 12, dtype=torch.float64)
    changes = [
        (src, dst, grad_partial)
        for src, dst in itertools.product(MIRRORED, repeat=2)
        if "z" in src + dst
        for grad_partial in ([False, True] if dst == "R" else [False])
    ]

    def change(rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        found = []
        for src, dst, grad_partial in changes:
            source, target = map(parse_placement, (src, dst))
            x = place(tensor, source, rank, ranks).requires_grad_()
            y = redistribute(x, dist.group.WORLD.group_name, src, dst, grad_partial)
            of_y = Partial() if grad_partial else of_gradient(target)
            y.backward(place(above, of_y, rank, ranks))
            found.append((y.detach(), x.grad))
        return found

    by_change = zip(*on_ranks(ranks, change), strict=True)
    for (src, dst, grad_partial), found in zip(changes, by_change, strict=True):
        what = f"{src} to {dst}{', terms of its gradient' if grad_partial else ''}"
        target, of_x = parse_placement(dst), of_gradient(parse_placement(src))
        for values, expected, placement in (
            ([y for y, _ in found], tensor, target),
            ([grad for _, grad in found], above, of_x),
        ):
            for joined in whole(values, placement):
                torch.testing.assert_close(joined, expected, msg=lambda m, w=what: f"{w}: {m}")


def of_gradient(placement: Placement) -> Placement:
    """How the gradient of a value lies: of a sum it is whole."""
    return Replicate() if isinstance(placement, Partial) else placement


def look_up_rows(indices: torch.Tensor, table: torch.Tensor) -> Any:
    """Sum of this rank's rows over all ranks, and the gradient of its part of the table."""
    group = default_group().group_name
    rows = table.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    found = local_ops.vocab_embedding(rows, indices, -1, group)
    whole = redistribute(found, group, "P", "R", False)
    (whole * torch.arange(whole.numel()).view_as(whole)).sum().backward()
    assert rows.grad is not None
    return whole.detach().numpy(), rows.grad.numpy()


def test_a_table_divided_by_rows():
    """M26: four ranks hold four rows each of a table; lookup and gradient equal the whole's."""
    torch.manual_seed(0)
    table = torch.randn(16, 3, dtype=torch.float64)
    indices = torch.tensor([[0, 3, 4, 15], [8, 8, 11, 1]])
    by_rank = run_ranks(look_up_rows, 4, indices, table)
    dense = table.clone().requires_grad_()
    expected = F.embedding(indices, dense)
    (expected * torch.arange(expected.numel()).view_as(expected)).sum().backward()
    for found, _ in by_rank:
        torch.testing.assert_close(torch.from_numpy(found), expected.detach())
    grads = torch.cat([torch.from_numpy(grad) for _, grad in by_rank])
    torch.testing.assert_close(grads, dense.grad)


def gather_from_odd_mesh() -> Any:
    """Hold one piece on the mesh of the example, and put the whole together again."""
    mesh = ProcessMesh(axes=("x", "y"), shape=(2, 3), ranks=(2, 4, 5, 0, 1, 3))
    cuts = Placements((("x", Shard(0)), ("y", Shard(1))))
    tensor = torch.arange(12.0).view(4, 3)
    piece = read(piece_of(tensor.shape, cuts, mesh, dist.get_rank()), tensor)
    joined = piece
    for axis, cut in reversed(cuts.pairs):  # fine cuts first
        for ranks in mesh.groups(axis):
            group = dist.new_group(list(ranks), sort_ranks=False)
            if dist.get_rank() in ranks:
                joined = run_step(joined, group.group_name, ("all_gather", cut.dim, 0))
    return tuple(piece.shape), joined.numpy()


def test_a_mesh_in_any_order_on_six_ranks():
    """D1, D2, D3: the mesh [[2, 4, 5], [0, 1, 3]] and a (4, 3) tensor cut both ways."""
    for shape, joined in run_ranks(gather_from_odd_mesh, 6):
        assert shape == (2, 1)
        assert torch.equal(torch.from_numpy(joined), torch.arange(12.0).view(4, 3))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("src", "dst"),
    [("S(1)x2", "R"), ("S(1)z2", "R"), ("R", "S(1)x2"), ("S(0)", "S(1)z2"), ("S(1)x2", "S(2)x2")],
)
def test_pieces_of_segments_compile(src, dst):
    """D20: as one graph, with the shapes that they have."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    name = default_group().group_name
    torch._dynamo.reset()
    change = torch.compile(
        lambda x: redistribute(x, name, src, dst, dst == "R"), backend="aot_eager", fullgraph=True
    )
    x = torch.ones(local_shape((4, 16, 8), parse_placement(src), 2), requires_grad=True)
    y = change(x)
    y.sum().backward()
    assert y.shape == local_shape((4, 16, 8), parse_placement(dst), 2)
    assert x.grad is not None
    assert x.grad.shape == x.shape
