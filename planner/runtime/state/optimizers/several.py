"""Several optimizers as one: Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.errors import ModelError


class Several(torch.optim.Optimizer):
    """Optimizers that step together. Their param groups, in order, and their state are its own.

    Schedulers on each of them go on working. Mutable, as they are.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ModelError for what are no optimizers, or have a parameter in common."""
        wrong = [each for each in parts if not isinstance(each, torch.optim.Optimizer)]
        if wrong or not parts:
            raise ModelError(
                f"optimizer= has {type(wrong[0]).__name__ if wrong else 'nothing'} in its list; "
                "give torch optimizers over parameters of the model"
            )
        params = [p for part in parts for group in part.param_groups for p in group["params"]]
        if len({id(p) for p in params}) < len(params):
            raise ModelError(
                "two optimizers of optimizer= have a parameter in common; give each its own"
            )
        self.parts = tuple(parts)
        # (The groups are theirs: those of the base class would be copies.)
        super().__init__([{"params": params}], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Let each of them step."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a state dict with the groups of all: each takes its own part, as it would alone.

        Raises ValueError for another number of groups.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the loaded state has {len(groups)} param groups and the optimizers "
                f"{len(self.param_groups)}"
            )
        for part in self.parts:
            own = [groups.pop(0) for _ in part.param_groups]
            ids = {index for group in own for index in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in ids}
            # What a part does with a state is its own: a subclass may keep it in another dtype.
            part.load_state_dict({**state_dict, "state": state, "param_groups": own})
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts:
            self.state.update(part.state)
        self._share()
