"""What searches leave behind for others of the same candidates under less memory.

All that is ruled out by memory stays ruled out, and a bound of what fits holds for the less of it
that still does. So a front of time against memory (`pareto`) is one walk, under ever less memory:
each search begins with the fastest plan priced so far that fits, and takes up configurations where
the ones before it left them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel import Estimate
from planner.plan import Plan
from search.partition.chain_problem import TooLarge
from search.space import Configuration

Key = tuple[Configuration, int]
"""A configuration and the id of its table."""

Priced = tuple[Configuration, int, tuple[int, ...], tuple[int, ...]]
"""A plan among candidates: configuration, id of the table, cuts and choices."""


@dataclass(kw_only=True)
class Learnt:
    """Mutable: it grows with every search, of which none has more memory than the one before.

    `priced` are plans with their estimates, fitting or not; `bounds` step times below which a
    configuration has nothing that fits (infinity: nothing fits), `refused` stages of it that are
    too large. `needs_every_size` tells that larger microbatches had to be looked at.
    """

    priced: dict[Priced, tuple[Plan, Estimate]] = field(default_factory=dict)
    bounds: dict[Key, float] = field(default_factory=dict)
    refused: dict[Key, tuple[TooLarge, ...]] = field(default_factory=dict)
    needs_every_size: bool = False

    def fastest(self, limit_bytes: float) -> tuple[Configuration, Plan, Estimate] | None:
        """Return the fastest plan priced so far that fits, if any does."""
        fitting = (
            (answer.step_s, answer.peak_bytes, index)
            for index, (_, answer) in enumerate(self.priced.values())
            if answer.peak_bytes <= limit_bytes
        )
        least = min(fitting, default=None)
        if least is None:
            return None
        (configuration, *_), found = [*self.priced.items()][least[2]]
        return configuration, *found

    def at_least(self, key: Key, bound: float) -> None:
        """Remember that a configuration has nothing that fits and is faster."""
        self.bounds[key] = max(bound, self.bounds.get(key, 0.0))
