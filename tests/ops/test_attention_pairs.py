"""Pairs of positions that attention meets, counted and by formula."""

from __future__ import annotations

import itertools

import pytest

from planner.language.ops.attention_pairs import pairs_met


def counted(queries, keys, low, high, chunk, segments, mirrored=False):
    """The pairs of the rank that has most of them, one by one."""
    ranks, piece = keys // queries, queries // segments
    most = 0
    for rank in range(ranks):
        turned = ranks - 1 - rank if mirrored else rank
        own = [turned if segment % 2 else rank for segment in range(segments)]
        starts = [(segment * ranks + own[segment]) * piece for segment in range(segments)]
        places = [start + at for start in starts for at in range(piece)]
        most = max(
            most,
            sum(
                (low is None or p - k >= low)
                and (high is None or p - k <= high)
                and (chunk is None or p // chunk == k // chunk)
                for p in places
                for k in range(keys)
            ),
        )
    return most


@pytest.mark.parametrize(("segments", "mirrored"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_pairs_by_formula_are_those_counted(ranks, segments, mirrored):
    """N9: causal, windows of one and of two sides, and no bounds."""
    for low, high in itertools.product((None, 0, -3), (None, 2, 9, 50)):
        given = {"low": low, "high": high, "segments": segments, "mirrored": mirrored}
        found = pairs_met(24 // ranks, 24, **given)
        assert found == counted(24 // ranks, 24, low, high, None, segments, mirrored)


def test_runs_are_sequences_of_their_own():
    """N9: chunks of 5 of 24 places, causal in each: 4 of 15 pairs and one of 10."""
    assert pairs_met(24, 24, low=0, high=None, chunk=5) == 4 * 15 + 10
    assert counted(24, 24, 0, None, 5, 1) == 70
