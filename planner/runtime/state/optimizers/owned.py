"""An optimizer whose updates the engine makes: what a loop for one device does beside them.

A script that was written for one device goes on to call `zero_grad` and `step`, or adds param
groups. The first would take gradients out of the buffers in which ranks sum them, the second train
twice, the third bring parameters of the user's module, which have no values any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.errors import PlanError
from planner.runtime.state.optimizers.several import Several


class Owned:
    """Guards an optimizer. Mutable: it is open for steps while the engine makes one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, is_accumulating: Callable[[], bool]
    ) -> None:
        """`is_accumulating` says whether gradients of batches wait for an update."""
        self._optimizer, self._is_accumulating = optimizer, is_accumulating
        self._is_open = False
        self._params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parts = optimizer.parts if isinstance(optimizer, Several) else ()
        for each in (optimizer, *parts):
            each.register_step_pre_hook(self._refuse_other_steps)
            each.zero_grad = self._keep_gradients  # type: ignore[method-assign]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the optimizer may step. Raises PlanError where it has other parameters now."""
        for group in self._optimizer.param_groups:
            if not self._params.issuperset(map(id, group["params"])):
                raise PlanError(
                    f"{type(self._optimizer).__name__} has parameters that it had not when the "
                    "plan was applied (add_param_group?); give it all before planner.apply, those "
                    "that train later with a learning rate of 0"
                )
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _refuse_other_steps(self, *_: Any) -> None:
        if not self._is_open:
            raise PlanError(
                f"{type(self._optimizer).__name__}.step() was called after planner.apply, and "
                "engine.step makes the update itself; leave it out"
            )

    def _keep_gradients(self, set_to_none: bool = True) -> None:
        """Do nothing: a step begins with gradients of its own."""
        if self._is_accumulating():
            raise PlanError(
                "optimizer.zero_grad() after engine.step(..., update=False) would lose the "
                "gradients that wait for the update; leave it out"
            )
