"""How much ranks with several stages recompute: what a level is and keeps, and the lowest."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from costmodel.memory.bound import OnHost
from search.partition.interleaved_levels import RecomputeLevels
from tests.search.recomputed import candidates_of, only_configuration

CHOICES = ("none", "selective", "full")
CUTS, HOMES = (0, 3, 4, 6, 8), (0, 1, 1, 0)
"""Uneven stages of two ranks: blocks 0, 1, 2, 6, 7 and blocks 3, 4, 5."""
BLOCKS = ((0, 1, 2, 6, 7), (3, 4, 5))


def levels_of(choices=CHOICES, on_host=None) -> RecomputeLevels:
    candidates = candidates_of(6)
    _, table = only_configuration(candidates)
    if on_host is not None:
        table = replace(table, on_host=on_host)
    return RecomputeLevels(table=table, cuts=CUTS, homes=np.array(HOMES), choices=choices)


def every_level(levels: RecomputeLevels):
    """All pairs of levels of the two ranks."""
    first, second = levels.most.tolist()
    return [np.array([a, b]) for a in range(first + 1) for b in range(second + 1)]


def heaviness(levels: RecomputeLevels, of_ranks) -> list[int]:
    """Which of the choices each block takes."""
    whole, pairs = range(len(levels.choices)), list(combinations(range(len(levels.choices)), 2))
    by_block = []
    for stage, (choice, until) in enumerate(zip(*levels.of_stages(of_ranks), strict=True)):
        light, heavy = [*((c, c) for c in whole), *pairs][choice]
        blocks = range(CUTS[stage], CUTS[stage + 1])
        by_block += [heavy if block < until else light for block in blocks]
    return by_block


@pytest.mark.parametrize("choices", [CHOICES, ("none", "full"), ("selective", "full")])
def test_each_level_makes_the_next_block_of_a_rank_recompute_more(choices):
    """By the table of the module: of N blocks the first (level mod N) are a choice ahead."""
    levels = levels_of(choices)
    assert levels.most.tolist() == [(len(choices) - 1) * len(blocks) for blocks in BLOCKS]
    for of_ranks in every_level(levels):
        found = heaviness(levels, of_ranks)
        for level, blocks in zip(of_ranks.tolist(), BLOCKS, strict=True):
            whole, ahead = divmod(level, len(blocks))
            expected = [whole + (at < ahead) for at in range(len(blocks))]
            assert [found[block] for block in blocks] == expected


@pytest.mark.parametrize("on_host", [OnHost(), OnHost(activations=True)])
@pytest.mark.parametrize("choices", [CHOICES, ("none", "full"), ("selective",)])
def test_levels_are_found_again_from_a_cut(choices, on_host):
    levels = levels_of(choices, on_host)
    for of_ranks in every_level(levels):
        assert (levels.of_cut(*levels.of_stages(of_ranks)) == of_ranks).all()


def test_with_offload_the_blocks_of_a_rank_recompute_alike():
    levels = levels_of(on_host=OnHost(activations=True))
    assert levels.most.tolist() == [2, 2]
    for of_ranks in every_level(levels):
        found = heaviness(levels, of_ranks)
        for level, blocks in zip(of_ranks.tolist(), BLOCKS, strict=True):
            assert [found[block] for block in blocks] == [level] * len(blocks)


@pytest.mark.parametrize("choices", [CHOICES, ("none", "full")])
def test_a_level_takes_what_its_blocks_recompute(choices):
    levels = levels_of(choices)
    partial = levels.table.partial(choices)
    for of_ranks in every_level(levels):
        by_block = []
        stages = zip(pairwise(CUTS), *levels.of_stages(of_ranks), strict=True)
        for (first, end), choice, until in stages:
            by_block += partial[choice - len(choices)].by_block(first, end, until)
        seconds = levels.table.recompute_s(by_block)
        expected = [seconds[a:b].sum() for a, b in pairwise(CUTS)]
        assert levels.again_s(of_ranks) == pytest.approx(expected)


def test_with_each_level_a_stage_keeps_no_more_and_no_more_than_the_cost_model_says():
    levels = levels_of()
    runs = levels.table.runs
    start, end = np.array(CUTS[:-1]), np.array(CUTS[1:])
    assert len(levels.kept) == levels.most.max() + 1
    for level, kept in enumerate(levels.kept):
        by_block = [CHOICES[at] for at in heaviness(levels, np.minimum(level, levels.most))]
        held = runs.kept(start, end, by_block)
        assert (kept <= held * (1 + 1e-9)).all()
        assert kept.sum() > 0.9 * held.sum()
    assert (np.diff(levels.kept, axis=0) <= 0).all()
    # A level frees something, until all of the rank's blocks are recomputed.
    of_ranks = levels.kept @ np.eye(2)[list(HOMES)]
    for rank, most in enumerate(levels.most.tolist()):
        assert (np.diff(of_ranks[: most + 1, rank]) < 0).any()
        assert (of_ranks[most:, rank] == of_ranks[most, rank]).all()
    least = [kept[[at for at, home in enumerate(HOMES) if home == rank]].min()
             for kept in levels.kept for rank in (0, 1)]  # fmt: skip
    assert levels.least_kept.ravel().tolist() == least


def test_a_single_choice_has_a_single_level():
    levels = levels_of(("selective",))
    assert levels.most.tolist() == [0, 0]
    assert levels.of_stages(levels.most) == ((0,) * 4, (0,) * 4)
    sums = levels.table.runs.kept_sums("selective")
    assert levels.kept.tolist() == [[sums[b] - sums[a] for a, b in pairwise(CUTS)]]


def test_the_lowest_level_that_fits_is_found():
    """Beside each rank's levels, in turn; above the highest where none does."""
    levels, rng = levels_of(), np.random.default_rng(7)
    none = 0
    for _ in range(200):
        fits = rng.random((int(levels.most.max()) + 1, 2)) < rng.choice([0.1, 0.5])
        lowest = rng.integers(0, levels.most + 1)
        found = levels.lowest(fits, lowest).tolist()
        for rank, most in enumerate(levels.most.tolist()):
            fitting = [at for at in range(lowest[rank], most + 1) if fits[at, rank]]
            assert found[rank] == (fitting[0] if fitting else most + 1)
            none += not fitting
    assert 20 < none < 380
