"""B10: attention over a ring: where it is offered, which rounds it has, what it computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from planner.language.layout.placement import OpSharding
from planner.language.ops.attention_pairs import rounds_met
from planner.language.ops.flops import op_work
from planner.language.ops.registry import local_ops, strategies
from planner.runtime.stage.calls.attention_tiles import Sight
from tests.sharding.programs import one_op

SDPA, MASKED = "aten.scaled_dot_product_attention.default", "planner.masked_attention"
RING = OpSharding.parse("S(2),S(2),S(2)->S(2)")


def heads(dtype=torch.float32, *, keys=16):
    query, key = (torch.zeros(2, 2, length, 8, dtype=dtype) for length in (16, keys))
    return query, key, key.clone()


def offered(single, *, asked=True):
    return strategies(single.op, single.program.tensor, 2, asked=asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_offered_where_it_is_asked_for(dtype):
    """Else plans would have it, whose sharding moves nothing, wherever tp or cp may."""
    causal = one_op(SDPA, *heads(dtype), is_causal=True)
    assert RING in offered(causal)
    assert RING not in offered(causal, asked=False)


@pytest.mark.parametrize(
    "single",
    [
        lambda: one_op(SDPA, *heads(), dropout_p=0.1, is_causal=True),
        lambda: one_op(SDPA, *heads(keys=8)),
        lambda: one_op(MASKED, *heads(torch.bfloat16), 0, 3, None, None, False, None, None),
    ],
    ids=["dropped weights", "keys of another sequence", "a window in half precision"],
)
def test_what_it_does_not_serve_has_none(single):
    assert RING not in offered(single())


def test_a_mask_that_is_a_tensor_has_none():
    single = one_op(SDPA, *heads(), torch.ones(16, 16, dtype=torch.bool))
    assert not any(str(s).startswith("S(2),S(2),S(2)") for s in offered(single))


BOUNDS = [(0, None, None), (None, None, None), (0, 2, None), (-5, 5, None), (0, None, 6)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("ranks", "segments", "mirrored"),
    [
        *((2, 1, False), (4, 1, False), (5, 1, False), (3, 2, False), (4, 3, False)),
        *((2, 2, True), (5, 2, True), (3, 4, True)),
    ],
)
def test_rounds_are_those_in_which_a_rank_meets_a_key(bounds, ranks, segments, mirrored):
    """Pair by pair."""
    low, high, chunk = bounds
    piece = 4
    sight = Sight(low, high, chunk, segments, ranks, 0, mirrored=mirrored)
    owner = {sight.place(s, rank): rank for s in range(segments) for rank in range(ranks)}
    assert len(owner) == segments * ranks
    found = set()
    for query, key in product(range(piece * ranks * segments), repeat=2):
        ahead = query - key
        within = (low is None or ahead >= low) and (high is None or ahead <= high)
        if within and (chunk is None or query // chunk == key // chunk):
            found.add((owner[query // piece] - owner[key // piece]) % ranks)
    told = rounds_met(
        piece, ranks=ranks, segments=segments, low=low, high=high, chunk=chunk, mirrored=mirrored
    )
    assert told == tuple(sorted(found))


@pytest.mark.parametrize(("cut", "pairs"), [("S(2)", 100), ("S(2)x2", 84), ("S(2)z2", 68)])
def test_work_is_that_of_the_rank_with_most_pairs(cut, pairs):
    """Causal, 16 positions on 2 ranks: the last has 100 of 136 pairs, in two pieces 84, mirrored
    half.
    """
    single = one_op(SDPA, *heads(), is_causal=True)
    sharding = OpSharding.parse(f"{cut},{cut},{cut}->{cut}")
    (op,) = local_ops(single.op, sharding, single.program.tensor, axis="cp", axis_size=2).ops
    whole = single.program.tensor
    local = {name: replace(meta, shape=(2, 2, 8, 8)) for name, meta in whole.items()}
    assert op_work(op, local).flop == 2 * 2 * pairs * 2 * (8 + 8)
