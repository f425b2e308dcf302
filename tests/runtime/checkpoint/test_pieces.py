"""Boxes of a tensor that a rank holds: against the cuts that the runtime makes of real tensors."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from planner.language.layout.pieces import Piece
from planner.language.layout.placement import Shard
from planner.language.layout.sharing import shard_dim
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.holdings import Holdings
from planner.runtime.state.weights import read
from tests.runtime.scenarios import capture


def put_together(piece: Piece, whole: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """The local tensor, chunk by chunk from the whole."""
    local = torch.full(piece.local_shape, -1)
    for chunk in piece.chunks(whole.element_size(), most_bytes):
        assert prod(b - a for a, b in chunk.box) > 0
        source = whole[tuple(slice(a, b) for a, b in chunk.box)]
        local[tuple(slice(a, b) for a, b in chunk.local)] = source
    return local


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_what_the_runtime_cuts(seed):
    """Segments, two axes on one dim, FSDP2's uneven chunks; in chunks of any size."""
    draw = random.Random(seed)
    shape = [draw.choice([12, 24]) for _ in range(draw.choice([1, 2, 3]))]
    whole = torch.arange(prod(shape)).reshape(shape)
    local, piece = whole, Piece.whole(shape)
    for _ in range(draw.choice([0, 1, 2])):
        dim = draw.randrange(len(shape))
        fitting = [s for s in (1, 2, 3) if local.shape[dim] % (2 * s) == 0]
        segments, number = draw.choice(fitting), draw.randrange(2)
        placement = Shard(dim, segments, mirrored=segments == 2 and draw.random() < 0.5)
        # The rank's chunk of each segment, side by side again; of mirrored ones from both ends.
        chunks = [segment.chunk(2, dim) for segment in local.chunk(segments, dim)]
        if placement.mirrored:
            chunks[1] = chunks[1][::-1]
        local = torch.cat([of_segment[number] for of_segment in chunks], dim)
        piece = piece.cut(placement, 2, number)
    if draw.random() < 0.5:
        parts, number = draw.choice([2, 5, 7]), draw.randrange(2)
        dim = shard_dim(local.shape, parts)
        chunks = local.chunk(parts, dim)
        local = chunks[number] if number < len(chunks) else local.narrow(dim, 0, 0)
        piece = piece.chunk(parts, number)
    assert piece.local_shape == tuple(local.shape)
    assert torch.equal(put_together(piece, whole, draw.choice([8, 100, 10**6])), local)
    assert torch.equal(read(piece, whole), local)


def test_a_number_is_one_chunk():
    (chunk,) = Piece.whole(()).chunks(4)
    assert chunk.box == chunk.local == ()


def test_a_tensor_without_elements_is_one_chunk_which_says_that_it_is_there():
    (chunk,) = Piece.whole((0, 3)).chunks(4)
    assert chunk.box == chunk.local == ((0, 0), (0, 3))


@pytest.mark.parametrize(
    "choices",
    [
        {"dp": 4},
        {"dp": 2, "tp": 2, "zero_stage": 3},
        {"cp": 2, "tp": 2},
        {"pp": 2, "tp": 2, "by_stage": {"tp": (2, 1)}, "microbatch_size": 2},
        {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved_1f1b", "num_microbatches": 2},
    ],
)
def test_each_element_is_written_by_one_rank(choices):
    """However many ranks hold it; replicas share the writing."""
    graph = capture("tied-gpt", torch.float64)
    plan = default_plan(graph, **choices)
    written: dict[str, torch.Tensor] = {}
    chunks_of_rank = []
    holdings = Holdings(graph, plan)
    for rank in range(plan.world_size):
        count = 0
        for held in holdings.of(rank).values():
            counts = written.setdefault(held.key, torch.zeros(held.meta.shape_at(1)))
            for at, chunk in enumerate(held.piece.chunks(8, 256)):
                if held.writes(held.key, at):
                    counts[tuple(slice(a, b) for a, b in chunk.box)] += 1
                    count += 1
        chunks_of_rank.append(count)
    assert written
    assert all((counts == 1).all() for counts in written.values())
    assert min(chunks_of_rank) > 0.4 * max(chunks_of_rank)
