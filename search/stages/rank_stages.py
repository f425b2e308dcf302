"""The stages of a table as ranks hold them: under degrees of replication, with limits on bytes.

A chain solver reads all runs of a window (`RankCostWindow`); who has a cut already reads its stages
(`RankStages.cut`). Both are `costmodel.time.stage_costs.StageCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.memory.bound import RankBound, kept_bytes
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.replicas import ReplicaPrices, replica_prices
from costmodel.time.stage_costs.runs import Flags, Floats, Indices
from costmodel.time.stage_costs.stage_costs import BlockRuns, StageCosts, cut_runs
from planner.layout.axes import Degrees
from planner.plan import Recompute
from planner.plan.replication import Replication
from profiles import Group
from search.partition.chain_problem import LeastNeeds, Line, RankLimit
from search.partition.chain_windows import Part, Window
from search.stages.partial_recompute import PartialRecompute
from search.stages.run_kinds import RunKinds

if TYPE_CHECKING:
    from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class RankCostWindow:
    """The costs of a window's runs, a `chain_problem.CostWindow`: `costs` has an entry for each of
    the `kinds` of runs, and each run has those of its kind.
    """

    start: Indices
    """First block of each run of the window."""
    end: Indices
    """Block after the last of each."""
    kinds: RunKinds
    costs: StageCosts
    stages: RankStages

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds, the same for all choices."""
        spread = self._spread(self.costs.forward_s + self._waits_s[0])
        return np.broadcast_to(spread, (self.stages.num_choices, *spread.shape))

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds by choice of a whole stage."""
        seconds = np.stack([self.costs.backward_s(choice) for choice in self.stages.choices])
        return self._spread(seconds + self._waits_s[1])

    @cached_property
    def _waits_s(self) -> tuple[Floats | float, Floats | float]:
        """What a run's forward and backward wait for transfers, of each kind of run
        (`costmodel.time.stage_costs.stage_costs.transfers`).
        """
        pp_group, (start, end) = self.stages.pp_group, (self.kinds.start, self.kinds.end)
        if pp_group is None:
            return 0.0, 0.0
        there_s, back_s = self.costs.runs.receive_s(pp_group)
        # Of the stage after, as far as it does not depend on where that ends.
        next_there_s, next_back_s = self.stages.table.chain.messages.transfer_s(pp_group)
        is_last = end == self.stages.num_blocks
        return np.where(start == 0, next_there_s[end], there_s), np.where(
            is_last, back_s, next_back_s[end]
        )

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds after the last job."""
        return self._spread(self.costs.after_s + self.costs.update_s)

    @cached_property
    def copies_s(self) -> tuple[Floats, Floats]:
        """Seconds, by choice, in which a microbatch's activations leave a device and return."""
        table, load = self.stages.table, self.costs.runs.load
        kept = (kept_bytes(load, recompute=choice) for choice in self.stages.choices)
        down, up = zip(
            *(table.copies_s(of_runs - load.side_bytes) for of_runs in kept), strict=True
        )
        return self._spread(np.stack(down)), self._spread(np.stack(up))

    def _spread(self, of_kinds: Floats) -> Floats:
        """Lay what is known of kinds out over the window."""
        spread: Floats = of_kinds[..., self.kinds.of]
        return spread

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """About the bytes of a rank holding each run with this many microbatches in flight;
        infinite for partial recomputation, which depends on what fits.
        """
        if choice >= len(self.stages.choices):
            return np.full(self.kinds.of.shape, np.inf)
        return self._spread(self._bytes[choice].conservative(in_flight))

    def on_rank(self, rank: RankLimit, part: Part) -> tuple[Floats, Flags]:
        """Return the backward seconds of the runs of a part on a rank, by choice, and whether each
        may fit: choices of whole stages, then partial recomputation as far as it must go.
        """
        of = self.kinds.of[part]
        start, end = self._ends(part)
        seconds = [own[part] for own in self.backward_s]
        fits = [self._within(rank, choice, part) for choice in range(len(seconds))]
        for known in rank.infeasible:
            if known.choice < len(fits):
                fits[known.choice] = fits[known.choice] & ~known.holds(start, end)
        if self.stages.partial:
            bare_s = (self.costs.bare_backward_s + self._waits_s[1])[of]
        for at, partial in enumerate(self.stages.partial):
            until = self.until(rank, len(self.stages.choices) + at, part)
            seconds.append(bare_s + partial.again_s(start, end, until))
            fits.append(until <= end)
        return np.stack(seconds), np.stack(fits)

    def until(self, rank: RankLimit, choice: int, part: Part) -> Indices:
        """Return up to which block the runs of a part recompute more under a pair of choices; after
        their end where they do not fit. 0 for choices of whole stages.
        """
        start, end = self._ends(part)
        if choice < len(self.stages.choices):
            return 0 * start
        of_kinds = self.stages.partial[choice - len(self.stages.choices)].until(
            self.kinds.start, self.kinds.end, self._most_kept(rank)
        )
        until = start + (of_kinds - self.kinds.start)[self.kinds.of[part]]
        for known in rank.infeasible:
            if known.choice == choice:
                least = self.stages.num_blocks + 1 if known.until is None else known.until
                until = np.where(known.holds(start, end), np.maximum(until, least), until)
        return until

    def _ends(self, part: Part) -> tuple[Indices, Indices]:
        """Return the first block of each run of a part, and the block after its last."""
        start, end = np.broadcast_arrays(self.start, self.end)
        return start[part], end[part]

    def _within(self, rank: RankLimit, choice: int, part: Part) -> Flags:
        if rank.is_conservative:
            return self.peak_bytes(rank.in_flight, choice)[part] <= rank.limit_bytes
        return self.fits(rank.in_flight, choice, rank.limit_bytes, part)

    def _most_kept(self, rank: RankLimit) -> Floats:
        """Return what a microbatch may keep of a run of each kind."""
        more = 0.0
        if rank.is_conservative:
            more = np.max([bound.beside_bytes for bound in self._bytes], axis=0)
        most: Floats = self._bytes[0].most_kept(
            rank.in_flight, rank.limit_bytes, more=more, is_conservative=rank.is_conservative
        )
        return most

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """What a rank holding each run needs at least."""
        return self._spread(self._bytes[choice].least(in_flight))

    def fits(self, in_flight: int, choice: int, limit_bytes: float, part: Part = ...) -> Flags:
        """Whether `least_bytes` are within a limit, of a part of the window."""
        flags: Flags = self._bytes[choice].may_fit(in_flight, limit_bytes)[self.kinds.of[part]]
        return flags

    @cached_property
    def _bytes(self) -> tuple[RankBound, ...]:
        """By recompute choice."""
        table, load = self.stages.table, self.costs.runs.load
        once = table.once_bytes.max(initial=0.0)
        load = replace(load, frozen_bytes=load.frozen_bytes + once)
        return tuple(
            RankBound(
                load=load,
                recompute=choice,
                receive_bytes=table.receive_bytes(self.kinds.start, self.kinds.end),
                **self.stages.byte_options,
            )
            for choice in self.stages.choices
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """`chain_dp.Stages` of a table under a mesh and ZeRO."""

    table: StageTable
    """Costs of all runs of blocks."""
    degrees: Degrees
    """Sizes of the mesh of a stage."""
    zero: int
    """ZeRO stage."""
    choices: tuple[Recompute, ...]
    """Recompute choices that a whole stage has."""
    is_by_block: bool = False
    """Whether the first blocks of a stage may recompute more than the others."""
    num_microbatches: int
    """Microbatches of a step."""
    splits_backward: bool = False
    """Whether the schedule has jobs of weight gradients alone."""
    pp_group: Group | None = None
    """The ranks between which transfers go that jobs wait for; None: they overlap."""
    polls: bool = False
    """Whether hosts poll for messages between stages."""

    @property
    def partial(self) -> tuple[PartialRecompute, ...]:
        """The pairs of choices of which the first blocks of a stage take the second."""
        return self.table.partial(self.choices, polls=self.polls) if self.is_by_block else ()

    @property
    def num_choices(self) -> int:
        """Choices of a whole stage, and pairs of them."""
        return len(self.choices) + len(self.partial)

    @cached_property
    def replication(self) -> Replication:
        """How ranks of a stage share its weights."""
        return Replication(
            replicas=self.degrees.along("data"),
            copies=self.degrees.along("copies"),
            zero_stage=self.zero,
            precision=self.table.precision,
            optimizer_on_host=self.table.on_host.optimizer,
        )

    @property
    def prices(self) -> ReplicaPrices:
        """Prices of exchange and update."""
        return replica_prices(self.table.costs, self.replication, self.table.degrees)

    def optimizer_s(self, param_bytes: float, num_params: float) -> float:
        """Return the update of a rank that holds so many bytes in so many tensors, with what it
        does itself about clipping if gradients are clipped.
        """
        return self.prices.update_s(param_bytes, num_params)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.table.num_blocks

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the global batch, which every rank is given whole."""
        parts = self.degrees.along("batch")
        samples = parts * self.table.microbatch_size * self.num_microbatches
        graph = self.table.graph
        return sum(graph.tensor[name].bytes_at(samples) for name in graph.batch_inputs)

    def cost_window(self, window: Window) -> RankCostWindow:
        """Return the costs of every run of a window."""
        kinds, costs = self.table.window(window, self.replication, polls=self.polls)
        return RankCostWindow(
            start=window.start, end=window.end, kinds=kinds, costs=costs, stages=self
        )

    def costs_of(self, start: Indices, end: Indices) -> RankCostWindow:
        """Return the costs of these runs."""
        runs = BlockRuns(chain=self.table.chain_where(polls=self.polls), start=start, end=end)
        return RankCostWindow(
            start=start,
            end=end,
            kinds=RunKinds(start=start, end=end, of=np.arange(len(start))),
            costs=StageCosts(runs=runs, replication=self.replication),
            stages=self,
        )

    def cut(self, cuts: Sequence[int]) -> StageCosts:
        """Return what the stages between these cuts cost."""
        chain = self.table.chain_where(polls=self.polls)
        return StageCosts(runs=cut_runs(chain, cuts), replication=self.replication)

    @property
    def byte_options(self) -> dict[str, Any]:
        """What bounds of bytes need beside a run and its recompute choice."""
        return {
            "num_microbatches": self.num_microbatches,
            "replicas": self.replication.replicas,
            "copies": self.replication.copies,
            "zero": self.zero,
            "profile": self.table.profile,
            "precision": self.table.precision,
            "on_host": self.table.on_host,
            "copies_update": self.table.costs.execution.copies_update,
            "sum_factor": self.table.costs.execution.sum_factor(self.table.precision),
            "batch_bytes": self.batch_bytes,
            "splits_backward": self.splits_backward,
        }

    def least_needs(self, limit_bytes: float) -> LeastNeeds:
        """Return what any run of blocks takes at least, and what fits a limit."""
        table = self.table
        backward_s, kept_bytes = zip(*map(table.least_sums, self.choices), strict=True)
        held_twice = sum(size for _, _, size in table.ties)
        ranks = RankBound(load=StageLoad(), recompute="none", **self.byte_options)

        @cache
        def lines(in_flight: int) -> tuple[Line, ...]:
            found = ranks.lines(in_flight, limit_bytes * (1 + 1e-9))
            return tuple(
                (float(live), slope, slope * held_twice - float(fixed))
                for live, slope, fixed in found
            )

        return LeastNeeds(
            backward_s=backward_s,
            kept_bytes=kept_bytes,
            param_bytes=table.runs.sums["param_bytes"].tolist(),
            lines=lines,
            bare_backward_s=np.append(0.0, np.cumsum(table.backward_s)).tolist(),
            partial=self.table.partial(self.choices) if self.is_by_block else (),
        )
