"""`planner.apply` of a model that the plan was not made for."""

from __future__ import annotations

import pytest
from torch import nn

import planner
from planner.errors import CaptureError
from planner.language.lowering.defaults import default_plan
from tests.captures import capture_tiny


class TakesOtherInputs(nn.Module):
    """A model whose forward has other arguments than the plan's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, *, image):
        return self.up(image).sum()


def test_a_model_that_takes_other_batches_is_told_whose_the_plan_is():
    plan = default_plan(capture_tiny("mlp"), microbatch_size=2)
    with pytest.raises(CaptureError, match=r"the plan is for mlp .* a TakesOtherInputs was given"):
        planner.apply(plan, TakesOtherInputs())
