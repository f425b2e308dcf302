"""The step in parts of which each has one cause: work, imbalance, fill and drain, messages.

    step_s = work + imbalance + fill and drain + messages + inputs + clipping

    T(r)            work of pp rank r: its jobs, its exchange with replicas, its optimizer
    b               the bottleneck, the rank with the most work: T(b) = max T
    work            mean of T over ranks, by kind: what each would take of an even share
    imbalance       T(b) - mean T: the bottleneck's work beyond an even share
    messages        what the step would gain if messages between stages took no time, and what jobs
                    wait for messages that do not overlap
    fill and drain  the rest of what b waits: no microbatch has reached it yet, it has done its
                    last, or the order of jobs has none for it that could run

The rank that ends last need not be the bottleneck: then it waits for a slower stage, which is
imbalance here and would be a bubble of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """A step's seconds by cause; they add up to the step."""

    work_s: Mapping[str, float]
    """Mean over pp ranks, by kind of work (`search.report.words` has the kinds)."""
    imbalance_s: float
    """Work of the bottleneck beyond that mean."""
    fill_drain_s: float
    """The bottleneck has no job that could run."""
    messages_s: float
    """Messages between stages that nothing hides."""
    inputs_s: float
    """The batch is copied to the first stage's device."""
    clipping_s: float
    """The norm of all gradients, and waiting for the last rank."""
    by_rank_s: Mapping[str, tuple[float, ...]]
    """Work of each pp rank by kind: jobs, exchange with replicas, optimizer."""

    @property
    def rank_work_s(self) -> tuple[float, ...]:
        """Work of each pp rank."""
        return tuple(map(sum, zip(*self.by_rank_s.values(), strict=True)))

    @property
    def bottleneck(self) -> int:
        """The pp rank with the most work."""
        return max(range(len(self.rank_work_s)), key=self.rank_work_s.__getitem__)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """All parts by name, in the order in which they are told."""
        return {
            **self.work_s,
            "imbalance_s": self.imbalance_s,
            "fill_drain_s": self.fill_drain_s,
            "messages_s": self.messages_s,
            "inputs_s": self.inputs_s,
            "clipping_s": self.clipping_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the parts as JSON data, for `Plan.estimate`."""
        return {
            "parts": self.parts,
            "bottleneck_pp_rank": self.bottleneck,
            "by_pp_rank_s": {name: list(seconds) for name, seconds in self.by_rank_s.items()},
        }
