"""A module that was changed after a plan was applied to it."""

from __future__ import annotations

import pytest
from torch import nn

from planner.errors import PlanError
from planner.runtime.state.users_module.untouched import Untouched


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda m: m[0].weight.requires_grad_(False),
            "requires_grad of parameter 0.weight was",
        ),
        (lambda m: m[0].weight.register_hook(print), "gradient hooks of parameter 0.weight was 0"),
        (lambda m: m[1].register_forward_hook(print), r"number of hooks of module 1 was 0 .* is 1"),
        (lambda m: m.eval(), "training of module model was True"),
    ],
)
def test_changes_are_named(change, says):
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    seen = Untouched(module)
    seen.check()
    change(module)
    with pytest.raises(PlanError, match=says):
        seen.check()
