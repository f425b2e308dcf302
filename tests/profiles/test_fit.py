"""Fits recover what made the data, stay non-negative and shrug off single outliers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.lookup.fit import fit_nonnegative, fit_pieces, piecewise_at, rising


def test_coefficients_come_back():
    chance = np.random.default_rng(0)
    terms = np.stack([np.ones(40), chance.uniform(1e6, 1e9, 40), chance.uniform(1e3, 1e7, 40)], 1)
    truth = np.array([1e-5, 1e-11, 1e-10])
    coefficients, residual = fit_nonnegative(terms, terms @ truth)
    assert coefficients == pytest.approx(truth, rel=1e-6)
    assert np.abs(residual).max() < 1e-6


def test_one_outlier_does_not_bend_the_line():
    sizes = 2.0 ** np.arange(10, 26)
    seconds = 1e-5 + 1e-9 * sizes
    seconds[7] *= 20
    coefficients, _ = fit_nonnegative(np.stack([np.ones(16), sizes], 1), seconds)
    assert coefficients == pytest.approx([1e-5, 1e-9], rel=0.05)


def test_two_protocols_give_two_pieces():
    """Below 1 MiB latency and 1 GB/s, from there on more latency and 10 GB/s."""
    sizes = 2.0 ** np.arange(10, 28)
    seconds = np.where(sizes < 2**20, 1e-5 + 1e-9 * sizes, 1e-3 + 1e-10 * sizes)
    pieces, error = fit_pieces(sizes, seconds)
    assert [piece.min_bytes for piece in pieces] == [0.0, 2.0**20]
    assert pieces[1].beta_s_per_byte == pytest.approx(1e-10, rel=0.01)
    assert error < 0.01


def test_chunks_pipelined_through_hops_are_one_piece():
    """(sqrt(d a) + sqrt(n b))^2 with d a = 40 us, 1 / b = 400 GB/s, as over two nodes."""
    sizes = 4.0 ** np.arange(8, 18)
    seconds = (np.sqrt(4e-5) + np.sqrt(sizes / 4e11)) ** 2
    (piece,), error = fit_pieces(sizes, seconds)
    assert error < 1e-3
    assert piece.alpha_s == pytest.approx(4e-5, rel=0.01)
    assert piece.gamma_s_per_sqrt_byte == pytest.approx(2 * np.sqrt(4e-5 / 4e11), rel=0.02)
    assert piece.scaled(steps=2, share=0.5).seconds(1e8) == pytest.approx(
        (np.sqrt(8e-5) + np.sqrt(1e8 / 8e11)) ** 2, rel=0.01
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_a_piecewise_line_never_falls(seconds):
    sizes = 1024.0 * 2.0 ** np.arange(len(seconds))
    pieces, _ = fit_pieces(sizes, np.array(seconds))
    at = [piecewise_at(pieces, n) for n in np.geomspace(512, sizes[-1] * 4, 60)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(at))
    assert all(piece.alpha_s >= 0 and piece.beta_s_per_byte >= 0 for piece in pieces)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20))
def test_rising_is_the_identity_on_what_rises(seconds):
    level = rising(np.array(seconds))
    assert (np.diff(level) >= -1e-15).all()
    assert rising(np.sort(seconds)) == pytest.approx(np.sort(seconds))
