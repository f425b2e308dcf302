"""The script's optimizer after the take-over: it has options, and the engine all else."""

from __future__ import annotations

from typing import Any, Never

import torch

from planner.errors import PlanError

_STATE = (
    "optimizer.state is read or changed after the first step, and the engine has it; "
    "optimizer.state_dict() gives what it is, and what changes it goes before that step"
)


class StateAway(dict[Any, Any]):
    """The state of an optimizer whose engine has it: what a script writes there would change
    nothing, so whatever reaches it is refused.
    """

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise PlanError(_STATE)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    clear = get = items = keys = pop = popitem = setdefault = update = values = _refuse


def groups_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return which parameters the groups have, by identity."""
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def refuse_changes(optimizer: torch.optim.Optimizer, groups: list[list[int]]) -> None:
    """Raise PlanError where a script has put others in the place of an optimizer's state, or of the
    parameters that its groups had.
    """
    held: Any = optimizer.state
    if not isinstance(held, StateAway):
        raise PlanError(_STATE)
    if groups_of(optimizer) != groups:
        raise PlanError(
            "the parameters of optimizer.param_groups were changed after the first step; give all "
            "parameters before it, those that train later with a learning rate of 0"
        )
