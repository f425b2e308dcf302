"""Layout candidates of a tp, a cp and a microbatch size, and the stage table of each.

A candidate has a lower bound of its blocks' seconds from the layout solver, before the cost model
prices anything. There are three kinds, each found only where the one before is not pruned:

    optimistic   the least seconds of each op, no redistribution: no layout is solved
    fastest      the layout of the least seconds
    every        all layouts of the front: lean ones are slower than fast ones, and may fit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from costmodel import CostCache
from costmodel.memory.bound import NOTHING, OnHost, kept_bytes
from costmodel.time.program import accumulate_seconds
from planner.errors import LayoutError
from planner.layout.axes import find_axis
from planner.layout.propagate import propagate_on
from planner.plan import ClassLayout, Precision
from search.op_layout.layouts import Layouts, LayoutSolver
from search.space.shapes import Shape
from search.stages.stage_table import StageTable

Key = tuple[int, int, int]
"""tp, microbatch size and cp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCandidate:
    """A layout whose table is made, and prices its blocks, when it is needed.

    Attributes:
        find_table: returns the table.
        least_s: least seconds of one microbatch through all blocks, forward and backward.
        accumulate_s: seconds in which a microbatch's gradients are added to the sum of those
            before, as far as no layout divides them.
    """

    find_table: Callable[[], StageTable]
    least_s: float
    accumulate_s: float

    @property
    def table(self) -> StageTable:
        """The table."""
        return self.find_table()

    def least_step_s(self, shape: Shape) -> float:
        """Return a step time that a shape cannot beat with the layout: its work, dealt evenly."""
        return (self.least_s + self.accumulate_s) * shape.num_microbatches / shape.pp


@dataclass(kw_only=True)
class LayoutCandidates:
    """Layout candidates and tables of one model on one machine; remembers answers.

    Attributes:
        solver: finds layouts of blocks.
        costs: the cost model's prices.
        precision: of parameters and their optimizer.
        on_host: what plans put on the host.
        why_no_cp: why cp cannot divide the blocks of the last layout without a table.
    """

    solver: LayoutSolver
    costs: CostCache
    precision: Precision = "model"
    on_host: OnHost = NOTHING
    why_no_cp: LayoutError | None = None
    _fastest: dict[Key, tuple[LayoutCandidate, ...]] = field(default_factory=dict)
    _every: dict[Key, tuple[LayoutCandidate, ...]] = field(default_factory=dict)
    _tables: dict[Key, tuple[StageTable, ...]] = field(default_factory=dict)
    _table_of: dict[tuple, StageTable] = field(default_factory=dict)
    _accumulate_s: dict[int, float] = field(default_factory=dict)

    def optimistic(self, tp: int, microbatch_size: int) -> LayoutCandidate:
        """Return the fastest layout with an optimistic bound: each op's least seconds, no moves.

        The layout itself is found when its table is needed.
        """
        seconds = self.solver.least_seconds(tp, microbatch_size)
        return self._candidate(lambda: self.fastest(tp, microbatch_size)[0].table, tp, seconds)

    def fastest(self, tp: int, microbatch_size: int, cp: int = 1) -> tuple[LayoutCandidate, ...]:
        """Return the fastest layout; none where cp cannot divide its blocks."""
        key = tp, microbatch_size, cp
        if key not in self._fastest:
            solved = (self.solver.fastest(tp, microbatch_size),) if tp > 1 else ()
            self._fastest[key] = self._of(solved, key)
        return self._fastest[key]

    def every(self, tp: int, microbatch_size: int, cp: int = 1) -> tuple[LayoutCandidate, ...]:
        """Return each layout of the front; none where cp cannot divide the blocks of any."""
        key = tp, microbatch_size, cp
        if key not in self._every:
            if tp == 1:
                self._every[key] = self.fastest(*key)
            else:
                self._every[key] = self._of(self.solver.layouts(tp, microbatch_size), key)
        return self._every[key]

    def tables(self, tp: int, microbatch_size: int, cp: int = 1) -> tuple[StageTable, ...]:
        """Return one table per layout worth trying."""
        key = tp, microbatch_size, cp
        if key not in self._tables:
            self._tables[key] = worth_trying(layout.table for layout in self.every(*key))
        return self._tables[key]

    def leanest(self, tp: int, microbatch_size: int, cp: int = 1) -> tuple[StageTable, ...]:
        """Return tables of the layouts of fewest bytes, which no plan need have."""
        found = self.solver.leanest(tp, microbatch_size)
        tables = (self._table(layouts.by_class, tp, microbatch_size, cp) for layouts in found)
        return tuple(table for table in tables if table is not None)

    def _of(self, solved: Sequence[Layouts], key: Key) -> tuple[LayoutCandidate, ...]:
        tp, microbatch_size, cp = key
        least = {found.by_class: found.seconds / cp for found in solved} or {(): 0.0}
        candidates = []
        for by_class, seconds in least.items():
            table = self._table(by_class, tp, microbatch_size, cp)
            if table is not None:
                candidates.append(self._candidate(_always(table), tp, seconds))
        return tuple(candidates)

    def _candidate(
        self, find_table: Callable[[], StageTable], tp: int, seconds: float
    ) -> LayoutCandidate:
        """Return the candidate of a table whose ops and moves take so many seconds."""
        return LayoutCandidate(
            find_table=find_table,
            least_s=self._least_correction * seconds,
            accumulate_s=self._fixed_accumulate_s(tp),
        )

    def _fixed_accumulate_s(self, tp: int) -> float:
        """Return what adding up the gradients of all blocks takes, but for the sizes of those that
        tp may cut.
        """
        if tp not in self._accumulate_s:
            graph = self.costs.graph
            uses, cut = Counter(block.class_index for block in graph.blocks), inf if tp > 1 else 1
            self._accumulate_s[tp] = sum(
                count * accumulate_seconds(graph.classes[index], self.costs.profile, cut=cut)
                for index, count in uses.items()
            )
        return self._accumulate_s[tp]

    def _table(
        self, by_class: tuple[ClassLayout, ...], tp: int, microbatch_size: int, cp: int
    ) -> StageTable | None:
        """Return the table of layouts on tp, and of those on cp of what they make, if any."""
        key = by_class, tp, microbatch_size, cp
        if key not in self._table_of:
            try:
                on_cp = self._on_cp(by_class, tp, microbatch_size, cp)
            except LayoutError as error:
                self.why_no_cp = error
                return None
            self._table_of[key] = StageTable(
                costs=self.costs,
                layouts=by_class,
                tp=tp,
                microbatch_size=microbatch_size,
                cp=cp,
                cp_layouts=on_cp,
                precision=self.precision,
                on_host=self.on_host,
            )
        return self._table_of[key]

    def _on_cp(
        self, by_class: tuple[ClassLayout, ...], tp: int, microbatch_size: int, cp: int
    ) -> tuple[ClassLayout, ...]:
        if cp == 1:
            return ()
        graph = self.costs.graph
        on_tp = {layout.class_index: layout for layout in by_class}
        programs = [
            self.costs.local(index, tp, microbatch_size, on_tp.get(index))
            for index in range(len(graph.classes))
        ]
        return propagate_on(
            graph, find_axis("cp"), size=cp, microbatch_size=microbatch_size, programs=programs
        )

    @cached_property
    def _least_correction(self) -> float:
        """Return what part of the sum of its ops a block takes at least."""
        correction = self.costs.profile.block_correction
        return min(1.0, correction("forward"), correction("backward"))


def _always(table: StageTable) -> Callable[[], StageTable]:
    return lambda: table


def worth_trying(tables: Iterable[StageTable]) -> tuple[StageTable, ...]:
    """Return the tables that are not slower than another without holding clearly less.

    The layout solver counts bytes roughly; these are the cost model's own.
    """
    kept: list[tuple[float, float, float]] = []
    result = []

    def seconds(table: StageTable) -> float:
        return float((table.forward_s + table.backward_s).sum())

    for table in sorted(tables, key=seconds):
        load = table.blocks
        mine = (
            float(load.param_bytes.sum()),
            float(kept_bytes(load, recompute="none").sum()),
            float(kept_bytes(load, recompute="full").sum()),
        )
        if not kept or any(
            all(size < 0.98 * other[part] for other in kept) for part, size in enumerate(mine)
        ):
            kept.append(mine)
            result.append(table)
    return tuple(result)
