"""Rows of the fullest rank: by hand, by drawing, and there and back."""

from math import exp, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from costmodel.execution.dispatch.imbalance import (
    Imbalance,
    expected_fullest,
    fullest_within,
    imbalance_of,
    most_rows,
)
from planner.language.templates import Experts, Transformer, build_transformer


def test_of_two_ranks_the_larger_is_known_in_closed_form():
    """E[max(X, Y)] = 2 Phi(s / sqrt 2) for two log-normals of mean 1."""
    for sigma in (0.1, 0.5, 1.2):
        assert expected_fullest(sigma, 2) == pytest.approx(2 * NormalDist().cdf(sigma / sqrt(2)))


@pytest.mark.parametrize(("sigma", "ranks"), [(0.12, 8), (0.66, 16), (1.0, 64)])
def test_the_fullest_of_many_draws_is_as_expected(sigma: float, ranks: int):
    rng = np.random.default_rng(7)
    drawn = np.exp(sigma * rng.standard_normal((100_000, ranks)) - sigma**2 / 2).max(axis=1)
    assert expected_fullest(sigma, ranks) == pytest.approx(drawn.mean(), rel=0.01)
    for odds in (0.5, 0.9):
        assert fullest_within(sigma, ranks, odds) == pytest.approx(
            np.quantile(drawn, odds), rel=0.02
        )


def test_forced_routing_is_even_and_more_ranks_are_less_so():
    assert expected_fullest(0.0, 64) == fullest_within(0.0, 64, 0.99) == 1.0
    fullest = [expected_fullest(0.3, ranks) for ranks in (1, 2, 8, 64)]
    assert fullest == sorted(set(fullest))
    assert fullest[0] == 1.0


def test_a_measured_rank_tells_the_imbalance():
    for sigma in (0.05, 0.66, 1.19):
        assert imbalance_of(expected_fullest(sigma, 16), 16) == pytest.approx(sigma, abs=1e-4)
    assert imbalance_of(1.0, 8) == 0.0


def test_no_rank_receives_more_than_all_have():
    """Of 8 experts, 2 a token, a rank of 8 has one: at most every token, 4 times the mean."""
    model = Transformer(layers=1, hidden=64, heads=4, kv_heads=4, ffn_hidden=64, gated=True,
                        vocab=128, seq_len=16, norm="rms", positions="rotary", bias=False,
                        tied=False, experts=Experts(number=8, per_token=2, width=32))  # fmt: skip
    program = build_transformer(model).classes[1].bind(1)
    assert most_rows(program, 8) == 4
    assert most_rows(program, 2) == 2
    uneven = Imbalance(2.5, 0.9)
    assert uneven.of_time(8, most=4) == uneven.of_memory(8, most=4) == 4
    assert uneven.of_memory(8, most=100) == pytest.approx(
        exp(2.5 * NormalDist().inv_cdf(0.9 ** (1 / 8)) - 2.5**2 / 2)
    )
