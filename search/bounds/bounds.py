"""The catalogue asked for one table: the highest of its bounds.

Before a configuration has stage boundaries the search leaves it out where the highest bound of its
step is no less than the best step found, or the highest bound of its memory is over the limit. Each
bound is below the cost model's own answer, so nothing that is best is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from search.bounds import step_bounds  # noqa: F401  (fills the catalogue)
from search.bounds.catalogue import MEMORY_BOUNDS, STEP_BOUNDS, Formula
from search.bounds.least_costs import LeastCosts
from search.bounds.memory_bounds import kept_in_flight
from search.space.shapes import Configuration, Shape
from search.stages.stage_table import StageTable


@dataclass(kw_only=True, eq=False)
class TableBounds:
    """Bounds of all configurations that share a table."""

    table: StageTable
    _peaks: dict[tuple, float] = field(default_factory=dict)

    @cached_property
    def costs(self) -> LeastCosts:
        """What the table's blocks take at least."""
        return LeastCosts(table=self.table)

    def block_seconds(self, recompute: str) -> float:
        """Return one microbatch's seconds through all blocks, nothing exchanged."""
        return self.costs.chain_s(recompute)

    def least_step_of_shape(self, shape: Shape) -> float:
        """Return a step time that no schedule and no stage boundaries of a shape can beat."""
        of_all = [bound.formula for bound in STEP_BOUNDS if not bound.reads_schedule]
        any_option = replace(shape, options=shape.options[:1])
        least_s = min(
            max(formula(self.costs, config) for formula in of_all)
            for config in any_option.configurations()
        )
        return least_s + self._inputs_s(shape.pp, shape.num_microbatches)

    def least_step_s(self, config: Configuration) -> float:
        """Return a step time that no stage boundaries can beat, for `vpp` 1."""
        least_s = max(bound.formula(self.costs, config) for bound in STEP_BOUNDS)
        return least_s + self._inputs_s(config.pp, config.num_microbatches)

    def least_peak_bytes(self, config: Configuration) -> float:
        """Return bytes that the fullest rank of any stage boundaries needs at least."""
        return max(self._peak(bound.name, bound.formula, config) for bound in MEMORY_BOUNDS)

    def kept_bound(self, config: Configuration, in_flight: Sequence[int]) -> float:
        """Return the bytes that activations in flight alone must take on some rank."""
        return kept_in_flight(self.costs, config, in_flight)

    def _peak(self, name: str, formula: Formula, config: Configuration) -> float:
        # All configurations of a shape with the same ZeRO stage share it.
        key = name, config.dp, config.pp, config.zero, config.recompute
        if key not in self._peaks:
            self._peaks[key] = formula(self.costs, config)
        return self._peaks[key]

    def _inputs_s(self, pp: int, num_microbatches: int) -> float:
        """What the first stage loads of the batch before its first job, which every step begins
        with.
        """
        return self.table.least_inputs_s(pp=pp, num_microbatches=num_microbatches)
