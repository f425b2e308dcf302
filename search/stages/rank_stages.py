"""The stages of a table as ranks hold them: under degrees of replication, with limits on bytes.

A chain solver reads all runs of a window (`RankCostWindow`); who has a cut already reads its stages
(`RankStages.cut`). Both are `costmodel.time.stage_costs.StageCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from costmodel.cache import CostCache
from costmodel.memory.bound import RankBound, kept_bytes
from costmodel.memory.part_table import Phase
from costmodel.memory.parts import Ranks
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.replicas import ReplicaPrices, replica_prices
from costmodel.time.stage_costs.runs import Flags, Floats, Indices
from costmodel.time.stage_costs.stage_costs import BlockRuns, StageCosts, cut_runs
from planner.language.plan import Recompute
from planner.language.plan.replication import Replication
from planner.language.schedule import find_schedule
from planner.language.schedule.job_order import RoundTrips
from profiles import Group
from search.partition.chain_problem import LeastNeeds, Line, RankLimit
from search.partition.chain_windows import Part, RunKinds, Window
from search.space.configuration import Configuration, recompute_choices
from search.stages.partial_recompute import PartialRecompute
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
        # The runtime does not overlap transfers, so a job waits for what it receives.
        there_s, back_s = self.costs.runs.receive_s(pp_group)
        # Of the stage after, as far as it does not depend on where that ends.
        next_there_s, next_back_s = self.stages.table.chain.messages.transfer_s(pp_group)
        # Stage 0 receives nothing, and waits until it has sent forward; the last stage has no
        # gradient to wait for, and waits until it has sent its own back.
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
        # Side inputs come with the batch, and are not moved.
        down, up = zip(
            *(table.copies_s(of_runs - load.side_bytes) for of_runs in kept), strict=True
        )
        return self._spread(np.stack(down)), self._spread(np.stack(up))

    def _spread(self, of_kinds: Floats) -> Floats:
        """Return an array over kinds (..., kind) as an array over the window's runs."""
        spread: Floats = of_kinds[..., self.kinds.of]
        return spread

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """Least bytes of a rank that holds each run with this many microbatches in flight; infinite
        for partial recomputation, which depends on what fits.
        """
        if choice >= len(self.stages.choices):
            return np.full(self.kinds.of.shape, np.inf)
        return self._spread(self.bounds[choice].least(in_flight))

    def on_rank(self, rank: RankLimit, part: Part) -> tuple[Floats, Flags]:
        """Return the backward seconds of the runs of a part on a rank, by choice, and whether each
        may fit: choices of whole stages, then partial recomputation as far as it must go.
        """
        of = self.kinds.of[part]
        start, end = self._ends(part)
        # Choices of whole stages fit or not; partial ones recompute as much as must be to fit.
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
        may_fit = np.stack(fits)
        if rank.late_weights:
            # Whatever is recomputed, deferred weight gradients refer to as much.
            may_fit = may_fit & (self._with_late_bytes(rank.late_weights) <= rank.limit_bytes)[of]
        return np.stack(seconds), may_fit

    def _with_late_bytes(self, late_weights: int) -> Floats:
        """Return the least bytes of a rank with each kind of run once its last input gradient has
        left, the weight gradients of so many microbatches still to be made.
        """
        sums, kinds, bound = self.stages.table.late_sums, self.kinds, self.bounds[0]
        # Before it some weight gradients were made, unless those of all microbatches are late.
        has_gradients = late_weights < self.stages.configuration.num_microbatches
        phase = Phase.AFTER_BACKWARD if has_gradients else Phase.BEFORE_BACKWARD
        least: Floats = bound.with_saved(
            late_weights * (sums[kinds.end] - sums[kinds.start]), phase
        )
        return least

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
        # A run is its kind's moved along the chain, so it
        # recomputes as many blocks from its start on.
        until = start + (of_kinds - self.kinds.start)[self.kinds.of[part]]
        for known in rank.infeasible:
            if known.choice == choice:
                # Not feasible up to any block: beyond every end.
                least = self.stages.num_blocks + 1
                if known.until is not None:
                    least = known.until + known.shift(end)
                until = np.where(known.holds(start, end), np.maximum(until, least), until)
        return until

    def _ends(self, part: Part) -> tuple[Indices, Indices]:
        """Return the first block of each run of a part, and the block after its last."""
        start, end = np.broadcast_arrays(self.start, self.end)
        return start[part], end[part]

    def _within(self, rank: RankLimit, choice: int, part: Part) -> Flags:
        flags: Flags = self.bounds[choice].may_fit(rank.in_flight, rank.limit_bytes)
        return flags[self.kinds.of[part]]

    def _most_kept(self, rank: RankLimit) -> Floats:
        """Return what a microbatch may keep of a run of each kind."""
        # What a limit leaves for activations does not depend on what is recomputed of them.
        most: Floats = self.bounds[0].most_kept(rank.in_flight, rank.limit_bytes)
        return most

    @cached_property
    def bounds(self) -> tuple[RankBound, ...]:
        """Bytes of a rank that holds a run of each kind, by choice of a whole stage."""
        runs = self.costs.runs
        # Side inputs that a rank holds once are shared by its blocks: the largest counts.
        once, load = runs.chain.largest_once_bytes(runs.start, runs.end), runs.load
        load = replace(load, frozen_bytes=load.frozen_bytes + once)
        return tuple(self.stages.bound(load, choice) for choice in self.stages.choices)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """The stages of a table as ranks of a configuration hold them, a `chain_problem.Stages`; where
    neighbours may have other meshes (`is_mixed`), transfers are between stages and not in jobs.
    """

    table: StageTable
    configuration: Configuration
    is_mixed: bool = False

    @cached_property
    def choices(self) -> tuple[Recompute, ...]:
        """Recompute choices that a whole stage has."""
        return recompute_choices(self.configuration.recompute)

    @cached_property
    def partial(self) -> tuple[PartialRecompute, ...]:
        """The pairs of choices of which the first blocks of a stage take the second."""
        # There all blocks of a stage recompute alike.
        if self.is_mixed or self.table.on_host.activations:
            return ()
        return self.table.partial(self.choices, polls=self.polls)

    @property
    def num_choices(self) -> int:
        """Choices of a whole stage, and pairs of them."""
        return len(self.choices) + len(self.partial)

    @cached_property
    def polls(self) -> bool:
        """Whether hosts poll for messages between stages."""
        return self.table.costs.polls(self.configuration.degrees, pp=self.configuration.pp)

    @cached_property
    def pp_group(self) -> Group | None:
        """The ranks between which transfers go that jobs wait for; None: they overlap."""
        return None if self.is_mixed else self.table.waited_transfer(self.configuration)

    @cached_property
    def replication(self) -> Replication:
        """How ranks of a stage share its weights."""
        return _replication(self.table, self.configuration)

    @property
    def prices(self) -> ReplicaPrices:
        """Prices of exchange and update."""
        return replica_prices(self.table.costs, self.replication, self.table.degrees)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.table.num_blocks

    @cached_property
    def _batch_bytes(self) -> int:
        """Bytes of what a rank is given of the batch: all of it, or a microbatch at a time."""
        configuration, graph = self.configuration, self.table.graph
        samples = configuration.microbatch_size
        if self.table.costs.execution.whole_batch:
            samples *= configuration.batch_parts * configuration.num_microbatches
        return sum(graph.tensor[name].bytes_at(samples) for name in graph.batch_inputs)

    @property
    def ahead_s(self) -> Floats:
        """The most of each block's whole backward that may come after its gradient is sent on."""
        is_sharded = self.replication.is_sharded
        return self.table.ahead_s(is_sharded=is_sharded, choices=self.choices)

    @cached_property
    def least_block_s(self) -> tuple[Floats, Floats, Floats]:
        """The least seconds of each block's forward and backward, and the most of the backward that
        may come after its gradient is sent on (`ChainProblem`).
        """
        table = self.table
        weight_s = table.weight_s if self.configuration.splits_backward else self.ahead_s
        again_s = table.least_recompute_s(self.choices)
        return table.forward_s, table.backward_s + again_s, weight_s

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

    def bound(self, load: StageLoad, recompute: Recompute) -> RankBound:
        """Return the bytes of ranks that have a load, each a stage of its own."""
        return rank_bound(
            self.table,
            self.configuration,
            load,
            recompute,
            batch_bytes=self._batch_bytes,
            splits_backward=find_schedule(self.configuration.schedule).splits_backward,
            refills=self.configuration.order.round_trips is not RoundTrips.UNKNOWN,
        )

    def least_needs(self, limit_bytes: float) -> LeastNeeds:
        """Return what any run of blocks takes at least, and what fits a limit."""
        table = self.table
        backward_s, kept_bytes = zip(*map(table.least_sums, self.choices), strict=True)
        # Running sums count a weight of several blocks at each; a run of all holds it once.
        held_twice = sum(size for _, _, size in table.ties)
        ranks = self.bound(StageLoad(), "none")

        @cache
        def lines(in_flight: int) -> tuple[Line, ...]:
            # A run has its running sum of parameters less `held_twice` at least, so what fits keeps
            # live * kept + slope * (sum - held_twice) + fixed <= 0.
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
            partial=table.partial(self.choices) if self.partial else (),
        )


def rank_bound(
    table: StageTable,
    config: Configuration,
    load: StageLoad,
    recompute: Recompute = "none",
    **more: Any,
) -> RankBound:
    """Return the bytes of a configuration's rank (or ranks, of arrays) that has a load; `more` are
    fields of the bound that depend on how many stages a rank has.
    """
    return RankBound(
        load=load,
        num_microbatches=config.num_microbatches,
        recompute=recompute,
        ranks=_ranks(table.costs, _replication(table, config)),
        profile=table.profile,
        activations_on_host=table.on_host.activations,
        **more,
    )


def _ranks(costs: CostCache, replication: Replication) -> Ranks:
    """Return how the ranks of a stage keep and update its state; `costs` keeps it."""
    return costs.once(
        ("ranks", replication), lambda: Ranks.under(replication, costs.execution, costs.profile)
    )


def _replication(table: StageTable, config: Configuration) -> Replication:
    """Return how ranks of a stage share its weights."""
    return Replication.on(
        config.degrees,
        zero_stage=config.zero,
        precision=table.precision,
        optimizer_on_host=table.on_host.optimizer,
    )
