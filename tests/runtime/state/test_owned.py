"""An optimizer steps while the engine makes an update, and not beside it."""

from __future__ import annotations

import pytest
import torch

from planner.errors import PlanError
from planner.runtime.state.optimizers.owned import Owned


def test_only_an_update_steps():
    waits = False
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    owned = Owned(optimizer, lambda: waits)
    weight.grad = torch.ones(2)
    with pytest.raises(PlanError, match=r"SGD\.step\(\) was called after planner\.apply"):
        optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(weight.grad, torch.ones(2)), "a loop's zero_grad loses nothing"
    with owned.stepping():
        optimizer.step()
    assert torch.equal(weight, torch.zeros(2))
    waits = True
    with pytest.raises(PlanError, match="would lose the gradients that wait"):
        optimizer.zero_grad()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(PlanError, match="add_param_group"), owned.stepping():
        pass
