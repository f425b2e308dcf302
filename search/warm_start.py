"""What one search leaves behind for the next one of the same candidates under less memory.

A plan that did not fit does not fit in less memory either, and a lower bound of what fitted holds
for the fewer plans that still do. A front of time against memory (`report/pareto`) is such a
sequence of searches. The next search begins with the fastest evaluated plan that fits, and with the
bounds that the searches before it reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel import Estimate
from planner.plan import Plan
from search.partition.chain_problem import TooLarge
from search.space.shapes import Configuration
from search.stages.stage_table import TableKey

NodeKey = tuple[Configuration, TableKey]
"""A configuration and the key of its stage table."""

PlanKey = tuple[Configuration, TableKey, tuple[int, ...], tuple[int, ...]]
"""A plan: configuration, key of the table, stage boundaries and recompute choices."""


@dataclass(kw_only=True)
class WarmStart:
    """Mutable: it grows with every search. No search has more memory than the one before.

    Attributes:
        plans: evaluated plans with their estimates, fitting or not.
        bounds: step time (s) below which nothing of a configuration fits; infinity: nothing fits.
        infeasible: stages of a configuration that are too large.
        needs_every_size: whether a search had to look at larger, slower microbatches.
    """

    plans: dict[PlanKey, tuple[Plan, Estimate]] = field(default_factory=dict)
    bounds: dict[NodeKey, float] = field(default_factory=dict)
    infeasible: dict[NodeKey, tuple[TooLarge, ...]] = field(default_factory=dict)
    needs_every_size: bool = False

    def fastest(self, limit_bytes: float) -> tuple[Configuration, Plan, Estimate] | None:
        """Return the fastest evaluated plan that fits, if any does."""
        fitting = [
            (estimate.step_s, estimate.peak_bytes, key[0], plan, estimate)
            for key, (plan, estimate) in self.plans.items()
            if estimate.peak_bytes <= limit_bytes
        ]
        if not fitting:
            return None
        _, _, configuration, plan, estimate = min(fitting, key=lambda entry: entry[:2])
        return configuration, plan, estimate

    def raise_bound(self, key: NodeKey, bound: float) -> None:
        """Remember that nothing of a configuration fits and is faster."""
        self.bounds[key] = max(bound, self.bounds.get(key, 0.0))
