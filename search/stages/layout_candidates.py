"""Layout candidates of a tp, a cp and a microbatch size, and the stage table of each.

A candidate has a lower bound of its blocks' seconds from the layout solver, before the cost model
prices anything. There are three kinds, each found only where the one before is not pruned:

    optimistic   the least seconds of each op, no redistribution: no layout is solved
    fastest      the layout of the least seconds
    every        all layouts of the front: lean ones are slower than fast ones, and may fit

The solver adds up ops that are priced alone. A runtime that fuses them, or overlaps collectives,
takes other sums; there the front is what the solver proposes, all of it is priced by the cost
model, and a candidate's bound is what its own blocks take. So it is where a search chooses whether
weight gradients are made beside collectives: each layout with a collective that hides behind them
has a second table, of the same blocks run that way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple, get_args

from costmodel import CostCache
from costmodel.execution.dispatch.choice import may_gather
from costmodel.execution.dispatch.of_plan import exchanges_s
from costmodel.memory.bound import NOTHING, OnHost
from costmodel.time.block.program import accumulate_seconds
from costmodel.topology import replica_mesh
from planner.errors import LayoutError
from planner.language.layout.axes import Degrees, lowered_axes, split_axes
from planner.language.lowering.attention_cut import (
    IN_PIECES,
    AttentionBy,
    attention_kinds,
    over_ring,
)
from planner.language.lowering.experts import check_rows, gathered_layout
from planner.language.lowering.propagate import propagate_on
from planner.language.plan import ClassLayout, Precision
from planner.language.stacks import Expressed
from search.op_layout.front import Layouts
from search.op_layout.layouts import LayoutSolver, SizedLayouts
from search.request import Logits
from search.space.configuration import BlockSizes, Shape
from search.stages.logit_rows import logit_rows
from search.stages.stage_table import StageTable
from search.stages.worth_trying import microbatch_seconds, worth_trying


class Border(NamedTuple):
    """How blocks hand on sequences that an axis cuts (`Shard`)."""

    pieces: int = 1
    mirrored: bool = False


ONE_PIECE = Border()
"""What blocks hand on in a plan made without a search."""

BORDERS = (Border(2, mirrored=True), Border(2), Border(4), Border(8))
"""What is tried beside one piece a rank, in this order."""

PIECES = (2, 4)
"""In how many pieces gathers and scatters of a forward are tried beside products."""

LEAST_SAVED = 0.005
"""Of a microbatch's seconds: what more pieces have to save for still more to be tried."""

Solve = Callable[[], Sequence[Layouts]]
"""Returns layouts on tp."""


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
        given: sizes on axes that a search does not try, as the request gives them.
        expressed: what the stack expresses that plans are for; None: everything.
        beside: whether weight gradients may be made beside collectives (`Plan.overlap`).
        logits: whether losses make logits in chunks (`SearchRequest.logits`).
        least_logit_bytes: whole logits of fewer bytes are not made in chunks.
        why_none: why an axis beside tp cannot divide the blocks of the last layout without a table.
    """

    solver: LayoutSolver
    costs: CostCache
    precision: Precision = "model"
    on_host: OnHost = NOTHING
    given: Degrees = field(default_factory=Degrees)
    expressed: Expressed | None = None
    beside: bool = False
    logits: Logits = "whole"
    least_logit_bytes: float = 0.0
    why_none: LayoutError | None = None
    _sized: dict[BlockSizes, SizedCandidates] = field(default_factory=dict)
    _accumulate_s: dict[bool, float] = field(default_factory=dict)
    """Seconds of adding up gradients, by whether an axis cuts parameters."""

    def under(self, least_logit_bytes: float) -> LayoutCandidates:
        """Return the same with chunks of logits from other bytes on; itself where they are not."""
        if self.logits == "whole" or least_logit_bytes == self.least_logit_bytes:
            return self
        return replace(self, least_logit_bytes=least_logit_bytes, _sized={})

    def at(self, tp: int, microbatch_size: int, *others: int) -> SizedCandidates:
        """Return those of some sizes of blocks (`BlockSizes`)."""
        key = BlockSizes(tp, microbatch_size, *others)
        if key not in self._sized:
            sizes = {"tp": tp, "cp": key.cp, "hp": key.hp, "ep": key.ep, "etp": key.etp}
            self._sized[key] = SizedCandidates(
                candidates=self,
                degrees=replica_mesh(self.given.with_sizes(**sizes)),
                microbatch_size=microbatch_size,
            )
        return self._sized[key]

    def candidate(
        self, find_table: Callable[[], StageTable], degrees: Degrees, seconds: float
    ) -> LayoutCandidate:
        """Return the candidate of a table whose ops and moves take so many seconds on tp alone."""
        # Axes outside tp divide at best all of it.
        parts = degrees.num_ranks // degrees["tp"]
        return LayoutCandidate(
            find_table=find_table,
            least_s=self._least_correction * seconds / parts,
            # Where an axis splits parameters, the solver has counted their sizes: what is left is
            # the same for all layouts.
            accumulate_s=self._fixed_accumulate_s(
                cuts_params=any(degrees[axis.name] > 1 for axis in split_axes())
            ),
        )

    def _fixed_accumulate_s(self, *, cuts_params: bool) -> float:
        """Return what adding up the gradients of all blocks takes, but for the sizes of those that
        an axis may cut.
        """
        if cuts_params not in self._accumulate_s:
            graph = self.costs.graph
            uses, cut = (
                Counter(block.class_index for block in graph.blocks),
                inf if cuts_params else 1,
            )
            self._accumulate_s[cuts_params] = sum(
                count * accumulate_seconds(graph.classes[index], self.costs.profile, cut=cut)
                for index, count in uses.items()
            )
        return self._accumulate_s[cuts_params]

    @cached_property
    def _least_correction(self) -> float:
        """Return what part of the sum of its ops a block takes at least."""
        correction = self.costs.profile.block_correction
        return min(1.0, correction("forward"), correction("backward"))


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedCandidates:
    """Layout candidates of one mesh of a replica and one microbatch size."""

    candidates: LayoutCandidates
    degrees: Degrees
    """Sizes on the axes that blocks are lowered on, and of the experts' mesh."""
    microbatch_size: int
    _tables_of: dict[tuple[ClassLayout, ...], tuple[StageTable, ...]] = field(default_factory=dict)
    """Every table, by layouts on tp."""

    @property
    def _adds_ops(self) -> bool:
        """Whether blocks take at least the sum of their ops as the solver prices them. With a part
        of the experts ops read less of their matrices than that.
        """
        of = self.candidates
        return of.costs.adds_ops and self.degrees["ep"] == 1 and not of.beside

    @property
    def optimistic(self) -> LayoutCandidate:
        """The fastest layout with an optimistic bound: each op's least seconds, no moves.

        The layout itself is found when its table is needed.
        """
        return self.candidates.candidate(
            lambda: self.fastest[0].table, self.degrees, self._layouts.least_seconds
        )

    @property
    def fastest(self) -> tuple[LayoutCandidate, ...]:
        """The fastest layout; none where cp cannot divide its blocks."""
        return self._priced(lambda: (self._layouts.fastest,))

    @property
    def every(self) -> tuple[LayoutCandidate, ...]:
        """Each layout of the front; none where cp cannot divide the blocks of any."""
        return self._priced(lambda: self._layouts.worth_pricing)

    def kinds(self) -> Iterator[tuple[LayoutCandidate, ...]]:
        """Yield candidates kind by kind, each more costly to find than the kind before; none where
        cp cannot divide their blocks.
        """
        if self._adds_ops:
            if self.degrees["cp"] * self.degrees["hp"] == 1 < self.degrees["tp"]:
                # Sums of ops alone bound a layout only where the runtime runs ops one by one.
                yield (self.optimistic,)
            yield self.fastest
        yield self.every

    @cached_property
    def tables(self) -> tuple[StageTable, ...]:
        """One table per layout worth trying."""
        return worth_trying(layout.table for layout in self.every)

    @property
    def leanest(self) -> tuple[StageTable, ...]:
        """Tables of the layouts of fewest bytes, which no plan need have."""
        solved = self._solved(lambda: self._layouts.leanest)
        return tuple(table for by_class in solved for table in self._tables(by_class))

    @property
    def _layouts(self) -> SizedLayouts:
        return self.candidates.solver.at(self.degrees["tp"], self.microbatch_size)

    def _tables(self, by_class: tuple[ClassLayout, ...]) -> tuple[StageTable, ...]:
        """Return the tables of layouts on tp: one for each way to divide on outer axes what they
        make; none where these cannot divide it.
        """
        if by_class not in self._tables_of:
            try:
                found = self._with_chunks(self._ways(by_class))
                self._tables_of[by_class] = tuple(self._with_beside(found))
            except LayoutError as error:
                self.candidates.why_none = error
                return ()
        return self._tables_of[by_class]

    def _with_chunks(self, tables: Iterable[StageTable]) -> Iterator[StageTable]:
        """Yield tables with logits whole, in chunks or both, as is asked for: in chunks where all
        rows are not one chunk, and, if there is a choice, are worth it.
        """
        of = self.candidates
        for table in tables:
            rows = 0
            if of.logits != "whole":
                rows = logit_rows(table, least_bytes=of.least_logit_bytes)
            if of.logits != "chunked" or not rows:
                yield table
            if rows:
                yield replace(table, logit_rows=rows)

    def _with_beside(self, tables: Iterable[StageTable]) -> Iterator[StageTable]:
        """Yield tables, and behind each that of weight gradients beside collectives, if any hide
        there, and that of gathers in pieces beside products, if it takes less than what is behind.
        """
        for table in tables:
            yield table
            if not self.candidates.beside:
                continue
            beside = replace(table, beside=True)
            if microbatch_seconds(beside) < microbatch_seconds(table):
                yield beside
                table = beside
            if not self.candidates.costs.adds_ops:  # compiled blocks gather whole
                continue
            cut = min((replace(table, pieces=k) for k in PIECES), key=microbatch_seconds)
            if microbatch_seconds(cut) < microbatch_seconds(table):
                yield cut

    def _ways(self, by_class: tuple[ClassLayout, ...]) -> Iterator[StageTable]:
        """Yield tables of layouts on tp, of all ways on outer axes, with tokens brought to experts
        in the form whose collectives take least.

        Raises LayoutError where outer axes cannot divide what the layouts make.
        """
        for table in self._ways_on_outer(by_class):
            gathered = self._gathered(table.layouts)
            # All tokens on each rank take more memory than the rows of its experts where a token
            # has fewer experts than there are ranks: then either form may be the one that fits.
            if gathered is None or self.degrees["ep"] > self.candidates.costs.experts_per_token:
                yield table
            if gathered is not None:
                yield self._table_of(gathered)

    def _gathered(self, layouts: tuple[ClassLayout, ...]) -> tuple[ClassLayout, ...] | None:
        """Return the layouts with tokens of experts gathered over ep, where the runtime has that
        and it takes less; None: they are exchanged.
        """
        costs, sizes = self.candidates.costs, (self.microbatch_size, self.degrees)
        if self.degrees["ep"] == 1 or not may_gather(costs.execution):
            return None
        on_ep = (gathered_layout(each, at) for at, each in enumerate(costs.graph.classes))
        found = (*layouts, *(layout for layout in on_ep if layout is not None))
        try:
            is_less = exchanges_s(costs, *sizes, found) < exchanges_s(costs, *sizes, layouts)
        except LayoutError:  # rows are used beside experts
            return None
        return found if is_less else None

    def _ways_on_outer(self, by_class: tuple[ClassLayout, ...]) -> Iterator[StageTable]:
        """Yield tables of layouts on tp: where an axis cuts sequences, of all kinds of attention
        with one piece a rank, and with queries on each rank in more and more pieces, and mirrored.

        Raises LayoutError where outer axes cannot divide what the layouts make.
        """
        of = self.candidates
        cheapest = self._table(by_class)
        axes = [axis for axis in lowered_axes() if axis.cuts_sequences]
        cuts_sequences = any(self.degrees[axis.name] > 1 for axis in axes)
        # Along one of them attention is by heads; the others have their choice.
        choosing = {axis.name for axis in axes if not axis.by_heads}
        is_by_heads = any(self.degrees[axis.name] > 1 for axis in axes if axis.by_heads)
        if cuts_sequences and of.expressed is not None:
            # Of a stack's own cut of sequences a layout tells no more than the kind it has.
            if of.costs.execution.rings_attention:
                # What it gathers is priced as a ring: so the plan says, where the stack has one.
                with suppress(LayoutError):
                    cheapest = self._table(by_class, "ring")
            yield cheapest
            return
        yield cheapest
        if not cuts_sequences:
            return
        on_cp = [layout for layout in cheapest.layouts if layout.axis in choosing]
        found = attention_kinds(of.costs.graph, on_cp)
        kinds = dict.fromkeys(found, cheapest)
        if len(kinds) != 1:  # without attention, or of several kinds
            return
        for kind in get_args(AttentionBy):
            # (By heads along both axes is by heads along one as large.)
            if kind not in kinds and not (kind == "heads" and is_by_heads):
                with suppress(LayoutError):
                    kinds[kind] = self._table(by_class, kind, gathered=kinds.get("queries"))
                    yield kinds[kind]
        gathered: dict[Border, StageTable] = {}
        for kind in IN_PIECES:
            least_s = before_s = microbatch_seconds(kinds[kind]) if kind in kinds else 0.0
            for border in BORDERS if kind in kinds else ():
                try:
                    table = self._table(by_class, kind, border, gathered=gathered.get(border))
                except LayoutError:
                    break
                yield table
                if kind == "queries":
                    gathered[border] = table
                after_s = microbatch_seconds(table)
                least_s, enough_s = min(least_s, after_s), LEAST_SAVED * before_s
                if border.mirrored:
                    # All ranks have the mean of causal work: where it makes no difference, no
                    # pieces do. It is tried for each size of cp, as shapes with a smaller one stand
                    # for shapes with a larger one (`outdone`).
                    if abs(before_s - after_s) < enough_s:
                        break
                    continue
                # With k pieces on n ranks the fullest has 1 + (1 - 1/n) / k of the mean causal
                # work: twice as many halve what is over. So all that follow save at most as much as
                # these did.
                floor_s, before_s = 2 * after_s - before_s, after_s
                if least_s - floor_s < enough_s:
                    break

    def _table(
        self,
        by_class: tuple[ClassLayout, ...],
        attention: AttentionBy | None = None,
        border: Border = ONE_PIECE,
        gathered: StageTable | None = None,
    ) -> StageTable:
        """Return the table of layouts on tp and one way to divide on outer axes what they make.

        `gathered` is that of attention by queries with the same border, of which a ring follows.
        """
        if attention == "ring" and gathered is not None:
            layouts = self._over_ring(gathered)
        else:
            layouts = self._with_outer(by_class, attention, border)
        return self._table_of(layouts)

    def _table_of(self, layouts: tuple[ClassLayout, ...]) -> StageTable:
        self._check_experts(layouts)
        self._check_expressed(layouts)
        return StageTable(
            costs=self.candidates.costs,
            layouts=layouts,
            degrees=self.degrees,
            microbatch_size=self.microbatch_size,
            precision=self.candidates.precision,
            on_host=self.candidates.on_host,
        )

    def _over_ring(self, gathered: StageTable) -> tuple[ClassLayout, ...]:
        """Return the layouts of a table with attention over a ring instead, all else as it is."""
        costs, inside = self.candidates.costs, Degrees()
        layouts: tuple[ClassLayout, ...] = ()
        for axis in lowered_axes():
            size = self.degrees[axis.name]
            for layout in gathered.layouts:
                if layout.axis == axis.name and axis.cuts_sequences and not axis.by_heads:
                    index = layout.class_index
                    inner = tuple(each for each in layouts if each.class_index == index)
                    program = costs.lowered(index, self.microbatch_size, inside, inner)
                    layouts += (over_ring(layout, program, size),)
                elif layout.axis == axis.name:
                    layouts += (layout,)
            inside = inside.with_sizes(**{axis.name: size})
        return layouts

    def _check_experts(self, layouts: tuple[ClassLayout, ...]) -> None:
        """Raise LayoutError where experts do not lie on ep under the layouts."""
        if self.degrees["ep"] == 1:
            return
        for index, program in enumerate(self.candidates.costs.graph.classes):
            own = tuple(layout for layout in layouts if layout.class_index == index)
            check_rows(program, {layout.axis: layout for layout in own}, self.degrees)
            self.candidates.costs.local(index, self.microbatch_size, self.degrees, own)

    def _check_expressed(self, layouts: tuple[ClassLayout, ...]) -> None:
        """Raise LayoutError where the stack has other layouts on the mesh."""
        if self.candidates.expressed is not None:
            why = self.candidates.expressed.why_not_laid_out(layouts, self.degrees)
            if why:
                raise LayoutError(f"{self.degrees}: {why}")

    def _with_outer(
        self, layouts: tuple[ClassLayout, ...], attention: AttentionBy | None, border: Border
    ) -> tuple[ClassLayout, ...]:
        """Return the layouts with those on each axis outside, of what is lowered inside it."""
        costs, degrees = self.candidates.costs, self.degrees
        graph, inside = costs.graph, Degrees(tp=degrees["tp"])
        # From the inside out: each axis divides the programs that the axes inside it leave a rank.
        for axis in lowered_axes()[1:]:
            if degrees[axis.name] == 1:
                continue
            programs = [
                costs.lowered(
                    index,
                    self.microbatch_size,
                    inside,
                    tuple(layout for layout in layouts if layout.class_index == index),
                )
                for index in range(len(graph.classes))
            ]
            layouts += propagate_on(
                graph,
                axis,
                size=degrees[axis.name],
                microbatch_size=self.microbatch_size,
                programs=programs,
                attention=attention,
                segments=border.pieces,
                mirrored=border.mirrored,
            )
            inside = inside.with_sizes(**{axis.name: degrees[axis.name]})
        return layouts

    def _solved(self, solve: Solve) -> dict[tuple[ClassLayout, ...], float]:
        """Return layouts on tp with the least seconds of each; none where a stack has none."""
        if self.degrees["tp"] == 1:
            # There is one layout, of nothing divided, and nothing to bound it by.
            return {(): 0.0}
        try:
            return {found.by_class: found.seconds for found in solve()}
        except LayoutError as error:
            if self.candidates.expressed is None:
                raise
            # No rule of some op splits it as the stack does.
            self.candidates.why_none = error
            return {}

    def _priced(self, solve: Solve) -> tuple[LayoutCandidate, ...]:
        candidates = []
        for by_class, seconds in self._solved(solve).items():
            for table in self._tables(by_class):
                if self._adds_ops:
                    found = self.candidates.candidate(_always(table), self.degrees, seconds)
                else:
                    # Where ops are fused, collectives overlap, or a rank has a part of the experts,
                    # the table's own price is the bound; gradient sums are in it.
                    found = LayoutCandidate(
                        find_table=_always(table),
                        least_s=microbatch_seconds(table),
                        accumulate_s=0.0,
                    )
                candidates.append(found)
        return tuple(candidates)


def _always(table: StageTable) -> Callable[[], StageTable]:
    return lambda: table
