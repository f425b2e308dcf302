"""The scale of a loss whose gradients are computed in float16, and the steps it passes over.

float16 has no number under 6e-8, and gradients of activations are often smaller: of a loss times
2**16 they are not. Above 65504 they are infinite, so the scale follows what the training bears, as
`torch.amp.GradScaler` has it:

    gradients of a step not finite    the step is passed over, scale / 2
    2000 steps in a row that were     scale * 2

Backwards begin with the scale times a loss's weight; sums of gradients, which are fp32, are divided
by it before their norm, the clip and the optimizer. It is a power of two: nothing else is rounded.
All ranks read one number of all gradients (`planner.runtime.step.update.values`), so all have one
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 2.0**127
"""The largest power of two in fp32."""


class LossScaler:
    """A dynamic scale. Mutable; equal on all ranks.

    Attributes:
        scale: what the loss is multiplied by.
        skipped_steps: how many steps were passed over.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """The defaults are those of `torch.amp.GradScaler`."""
        self.scale, self.skipped_steps = init_scale, 0
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._good_steps = growth_interval, 0

    @property
    def may_fall(self) -> bool:
        """Whether a smaller scale may make gradients finite: below 1 they are so by themselves."""
        return self.scale > 1

    def follow(self, *, is_skipped: bool) -> None:
        """Take in how a step ended."""
        if is_skipped:
            self.skipped_steps += 1
            self.scale *= self._backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.scale = min(self.scale * self._growth_factor, _MOST)
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return its state, as that of a GradScaler, with the steps that were passed over."""
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, which may be a GradScaler's."""
        self.scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._good_steps = int(state["_growth_tracker"])
        self.skipped_steps = int(state.get("skipped_steps", 0))
