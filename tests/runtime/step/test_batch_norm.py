"""Moments of parts, merged: those of all values together."""

from __future__ import annotations

import torch

from planner.runtime.step.batch_norm import Moments


def moments(values: torch.Tensor) -> Moments:
    mean = values.mean(0) if len(values) else values.new_zeros(values.shape[1])
    count = torch.tensor(float(len(values)), dtype=torch.float64)
    return Moments(count, mean, (values - mean).square().sum(0))


def test_parts_of_any_size_give_the_moments_of_the_whole():
    """Far from zero, where a sum of squares would cancel: E[x^2] - E[x]^2 of 1e8 has no digits."""
    torch.manual_seed(0)
    values = torch.randn(11, 3, dtype=torch.float64) + 1e8
    whole = moments(values)
    merged = moments(values[:0])
    for part in values.split([1, 7, 3]):
        merged = merged.merge(moments(part))
    assert merged.count == 11
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(merged.squares, whole.squares, rtol=1e-6, atol=0)
    variance = merged.squares / 10
    torch.testing.assert_close(variance, values.var(0), rtol=1e-6, atol=0)


def test_nothing_and_nothing_is_nothing():
    empty = moments(torch.zeros(0, 2, dtype=torch.float64))
    merged = empty.merge(empty)
    assert merged.count == 0
    assert torch.equal(merged.squares, torch.zeros(2, dtype=torch.float64))
