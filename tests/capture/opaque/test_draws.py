"""What a tried module draws is the same each time, and in an order along its samples."""

from __future__ import annotations

import pytest
import torch

from planner.capture.opaque.draws import TrialDraws


def test_draws_of_samples_differ_by_too_little_for_a_result():
    with TrialDraws() as draws:
        first, again = torch.rand(4, 2), torch.rand(4, 2)
    assert torch.equal(first, again)
    assert draws.number == 2
    assert draws.are_apart
    assert torch.all(first[1:] < first[:-1])
    assert first[-1] == pytest.approx(first[0], rel=1e-5)


def test_whole_numbers_may_be_places_of_other_samples():
    with TrialDraws() as draws:
        torch.dropout(torch.ones(3), 0.5, True)
        assert draws.are_apart, "a decision on an entry alone"
        torch.randperm(4)
    assert not draws.are_apart
