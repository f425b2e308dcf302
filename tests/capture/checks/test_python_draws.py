"""A number that Python draws is refused where it decides something, and only there."""

import random
from random import uniform

import numpy as np
import pytest
import torch
from torch import nn

from planner.capture import capture_module
from planner.capture.checks.draws.python_draws import decide_nothing
from planner.errors import CaptureError


class Skips(nn.Module):
    """Skips a layer where a draw is below `layerdrop`."""

    def __init__(self, layerdrop, draw=lambda: random.uniform(0, 1)):
        super().__init__()
        self.layer, self.layerdrop, self.draw = nn.Linear(4, 4), layerdrop, draw

    def forward(self, x):
        return (x if self.draw() < self.layerdrop else self.layer(x)).pow(2).mean()


def captured(model):
    return capture_module(model, torch.ones(2, 4), torch.ones(3, 4))


def test_no_layer_is_ever_skipped():
    functions = random.random, random.uniform
    assert len(captured(Skips(0.0)).blocks) == len(captured(Skips(0.0, draw=lambda: 1)).blocks)
    assert (random.random, random.uniform) == functions


@pytest.mark.parametrize("layerdrop", [1e-9, 0.3, 0.999])
def test_a_layer_that_is_skipped_now_and_then_is_refused(layerdrop):
    with pytest.raises(CaptureError, match="draws random numbers from Python"):
        captured(Skips(layerdrop))


@pytest.mark.parametrize(
    "draw",
    [lambda: uniform(0, 1), lambda: np.random.rand(), lambda: random.gauss(0, 1)],
    ids=["another name", "numpy", "another function"],
)
def test_what_draws_in_other_ways_is_refused(draw):
    with pytest.raises(CaptureError, match="draws random numbers from Python"):
        captured(Skips(-1e9, draw))


def test_extremes_and_the_middle_are_tried():
    seen = []
    assert decide_nothing(lambda: seen.append(random.uniform(2, 4)) or 7, 7)
    assert seen[:2] == [2, 3]
    assert 3.999 < seen[2] <= 4
