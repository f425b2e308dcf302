"""Random values that tell samples which are apart from those that only seem so."""

from __future__ import annotations

import pytest
import torch

from planner.capture.opaque.samples import (
    DRAWS,
    WHOLE_NUMBERS,
    are_apart,
    input_like,
    own_like,
    splits,
)

X = torch.empty(4, 6, device="meta")


def apart(function, *tensors):
    """The splits under which a function keeps two samples apart, in every draw."""
    found = None
    for draw in DRAWS:
        values = [input_like(tensor, draw, 2, WHOLE_NUMBERS[0]) for tensor in tensors]
        made = [function(*values)]
        found = [
            split
            for split in (splits(values, 2) if found is None else found)
            if are_apart(lambda given: [function(*given)], values, made, split, 2)
        ]
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x.sort(-1).values,
        lambda x: torch.stack([row * 2 if row.mean() > 0 else row for row in x]),
    ],
)
def test_samples_computed_alone(function):
    assert apart(function, X) == [(True,)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.mean() > 0 else x,
        lambda x: x * 2 if x.abs().max() > 6 else x,
        lambda x: x - x.mean(0),
        lambda x: x.flip(0),
        lambda x: x / len(x),
        lambda x: x[: len(x) // 2],
        lambda x: torch.full_like(x, torch.inf),
    ],
)
def test_samples_that_meet(function):
    assert apart(function, X) == []


def test_what_samples_share_stays_whole():
    """Of a weight with an even first dim, too; a mask of samples goes with them."""
    weight, mask = torch.empty(6, 2, device="meta"), torch.empty(4, 1, device="meta")
    assert apart(lambda x, w: x @ w, X, weight) == [(True, False)]
    assert apart(lambda x, m: x * m, X, mask) == [(True, True)]


def test_values_have_the_dtype_and_are_finite():
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        tensor = torch.empty(4, 2, dtype=dtype, device="meta")
        for draw in DRAWS:
            assert input_like(tensor, draw, 2, WHOLE_NUMBERS[0]).dtype == dtype
        assert own_like(tensor).dtype == dtype
    assert (own_like(torch.empty(9)) > 0).all(), "a buffer may be a variance"
