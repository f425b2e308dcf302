"""Values of what a forward makes of sizes alone are known where it tests them; no others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planner.capture.checks.constants import MOST
from planner.capture.checks.stays_on_meta import OnMeta

BATCH = torch.empty(2, 3, device="meta")


def packed(positions: Tensor) -> Tensor:
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).any()


@pytest.mark.parametrize(
    ("made", "value"),
    [
        (lambda: torch.ones(2, 3).all(), True),
        (lambda: torch.ones_like(BATCH).to(torch.bool)[:, -1].all(), True),
        (lambda: BATCH.new_zeros(2).sum() == 0, True),
        (lambda: packed(torch.arange(5).unsqueeze(0) + 1), False),
        (lambda: packed(torch.arange(5, device="cuda").expand(2, -1) * 2), True),
        (lambda: torch.arange(3).to("cuda", torch.long).sum() > 3, False),
        # A draw is 0 or more, and less than 1.
        (lambda: torch.rand([]) < 0.0, False),
        (lambda: torch.rand([]) < 1, True),
        (lambda: torch.rand(()) >= 0, True),
        (lambda: torch.rand(3).gt(1.0).any(), False),
        (lambda: torch.rand([]) <= -0.1, False),
    ],
)
def test_values_are_known(made: Callable[[], Tensor], value: bool):
    with OnMeta():
        tested = made()
        assert tested.is_meta
        assert bool(tested) is value
        assert tested.item() is value


def written() -> Tensor:
    mask = torch.ones(3)
    mask[0] = 0
    return mask.all()


def written_through_a_view() -> Tensor:
    mask = torch.ones(3, 1)
    mask.view(3).mul_(0)
    return mask.all()


@pytest.mark.parametrize(
    "made",
    [
        lambda: BATCH.all(),
        lambda: (torch.ones(2, 3) * BATCH).all(),
        lambda: torch.rand(3).all(),
        lambda: torch.rand([]) < 0.1,
        lambda: torch.rand([]) > 0,
        lambda: torch.rand([]) < BATCH.sum(),
        lambda: torch.rand([]).mul_(-1) < 0,
        lambda: torch.randn([]) < 0,
        lambda: torch.empty(3).all(),
        lambda: torch.ones(MOST + 1).all(),
        written,
        written_through_a_view,
    ],
)
def test_what_is_of_the_batch_drawn_written_or_too_large_has_no_known_value(made):
    with OnMeta(), pytest.raises(RuntimeError):
        bool(made())
