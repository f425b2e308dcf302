"""Even cuts against brute force, and by eye."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from search.partition.balance import balanced_cut


def longest(seconds, cuts) -> float:
    return max(sum(seconds[a:b]) for a, b in pairwise(cuts))


def test_the_longest_stage_is_as_short_as_brute_force_finds():
    rng = np.random.default_rng(2)
    for _ in range(300):
        n = int(rng.integers(1, 10))
        stages = int(rng.integers(1, n + 1))
        seconds = rng.choice([0.0, 1.0, 1.5, 4.0], n).tolist() if rng.integers(2) else (
            rng.uniform(0, 3, n).tolist()
        )  # fmt: skip
        best = min(
            longest(seconds, (0, *inner, n)) for inner in combinations(range(1, n), stages - 1)
        )
        cuts = balanced_cut(seconds, stages)
        assert len(cuts) == stages + 1
        assert list(cuts) == sorted(set(cuts))
        assert longest(seconds, cuts) == pytest.approx(best, rel=1e-6)


def test_equal_blocks_give_even_stages_not_full_ones_first():
    """9 equal blocks on 4 stages: 3 is the longest either way; 2 2 2 3, not 3 3 2 1."""
    assert balanced_cut([1.0] * 9, 4) == (0, 2, 4, 6, 9)
    assert balanced_cut([1.0] * 8, 4) == (0, 2, 4, 6, 8)


def test_a_light_embedding_and_a_heavy_head_move_the_cuts():
    """Embedding 0.1, six layers of 1, head 1.5 on 4 stages: the head takes one layer at most."""
    cuts = balanced_cut([0.1] + [1.0] * 6 + [1.5], 4)
    assert cuts == (0, 3, 5, 7, 8)


def test_too_many_stages_is_an_error():
    with pytest.raises(ValueError, match="2 blocks cannot make 3 stages"):
        balanced_cut([1.0, 1.0], 3)
