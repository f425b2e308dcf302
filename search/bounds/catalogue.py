"""The catalogue of bounds that need no stage boundaries: how a bound is added, and what asks them.

A bound is one function. It returns seconds (or bytes) that no plan of a configuration is below:

    @step_bound
    def longest_block(costs: LeastCosts, config: Configuration) -> float:
        return config.num_microbatches * float(costs.block_s(config.recompute).max())

`tests/search/test_bounds.py` holds every one in the catalogue to that on random plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search.bounds.least_costs import LeastCosts
from search.space.shapes import Configuration

Formula = Callable[[LeastCosts, Configuration], float]
"""From a table's least costs and a configuration to seconds or bytes; 0 where it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound by name. With `reads_schedule` it depends on the schedule and holds for one stage a
    rank; without, it is one number for all schedules of a shape, asked once for them.
    """

    name: str
    formula: Formula
    reads_schedule: bool


STEP_BOUNDS: list[Bound] = []
"""Lower bounds of a step, in seconds; filled by `step_bound`."""

MEMORY_BOUNDS: list[Bound] = []
"""Lower bounds of the fullest rank, in bytes; filled by `memory_bound`. None reads the schedule."""


def step_bound(formula: Formula) -> Formula:
    """Register a bound of a step that holds for every schedule and number of stages a rank."""
    STEP_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=False))
    return formula


def schedule_bound(formula: Formula) -> Formula:
    """Register a bound of a step that depends on the schedule; one stage a rank."""
    STEP_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=True))
    return formula


def memory_bound(formula: Formula) -> Formula:
    """Register a bound of the fullest rank's bytes."""
    MEMORY_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=False))
    return formula
