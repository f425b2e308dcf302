"""Interleaved stages (several a rank): their one partition, recompute choices, time and bytes.

The chain is cut as evenly as blocks allow (`balance`); a rank that activations do not fit
recomputes as many of its blocks as it must (`interleaved_levels`). What does not depend on replicas
(`EvenCut`) is computed once for all configurations of a table with so many stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel import StageCosts, StageLoad
from costmodel.memory.bound import RankBound, live_on_device
from costmodel.memory.part_table import Phase
from costmodel.time.stage_costs.stage_costs import BlockRuns, cut_runs, transfers
from planner.language.plan import Recompute
from planner.language.schedule.registry import stage_to_pp_rank
from search.bounds.copied_jobs import CopiedRow, extra_s, seconds_by_kind
from search.partition.chain_problem import Floats, InfeasibleStage
from search.partition.interleaved_levels import RecomputeLevels
from search.space.configuration import Configuration
from search.space.job_tables import live_microbatches, warmup_of, whole_stages_of
from search.stages.rank_stages import RankStages, rank_bound
from search.stages.stage_table import StageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds that bound a step, by stage (`tail_s`: by rank).

    Attributes:
        forward_s: forward of a microbatch.
        backward_s: its backward, with what is recomputed.
        ahead_s: the part of the backward that may run after the gradient is sent.
        transfer_s: transfer of activations into the stage; a single 0: not counted.
        back_transfer_s: transfer of the gradient back from the stage; a single 0: not counted.
        tail_s: gradient exchange and optimizer after the rank's last job.
    """

    forward_s: Floats
    backward_s: Floats
    ahead_s: Floats
    transfer_s: Floats
    back_transfer_s: Floats
    tail_s: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class EvenCut:
    """The stages between `cuts` on the ranks of a schedule, before anything is said about replicas;
    remembers answers.
    """

    table: StageTable
    cuts: tuple[int, ...]
    homes: NDArray[np.intp]
    """The pp rank of each stage."""
    polls: bool
    """Whether hosts poll for messages between stages."""
    least_step_s: dict[tuple[Any, ...], float] = field(default_factory=dict)
    """What `InterleavedStages.least_step_s` has found."""
    _levels: dict[tuple[Recompute, ...], RecomputeLevels] = field(default_factory=dict)
    _least_kept: dict[tuple[int, tuple[Recompute, ...]], Floats] = field(default_factory=dict)
    """`InterleavedStages.least_kept`, by the number of microbatches and the choices."""

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return int(self.homes.max()) + 1

    @cached_property
    def first(self) -> NDArray[np.intp]:
        """The first block of each stage."""
        return np.asarray(self.cuts[:-1])

    @cached_property
    def runs(self) -> BlockRuns:
        """What the stages cost, nothing exchanged with replicas."""
        return cut_runs(self.table.chain_where(polls=self.polls), self.cuts)

    def by_rank(self, of_stages: Floats) -> Floats:
        """Return each rank's sum over its stages."""
        return np.bincount(self.homes, weights=of_stages).astype(np.float64)

    @cached_property
    def stage_params(self) -> StageLoad:
        """Bytes of each stage's parameters, without those that an earlier stage of its rank has."""
        return StageLoad(
            **{name: self._without_tied(name) for name in ("param_bytes", "spread_bytes")}
        )

    @cached_property
    def rank_params(self) -> StageLoad:
        """The same of each rank."""
        return StageLoad(
            param_bytes=self.by_rank(self.stage_params.param_bytes),
            spread_bytes=self.by_rank(self.stage_params.spread_bytes),
        )

    @cached_property
    def rank_tensors(self) -> list[tuple[float, ...]]:
        """Of each rank the bytes of its parameters, and how many there are."""
        return list(zip(*(self.by_rank(of).tolist() for of in self.runs.params), strict=True))

    def again_s(self, recomputed: Sequence[Recompute]) -> Floats:
        """Return what recomputation adds to a microbatch's backward, by stage, when the blocks
        recompute this.
        """
        again = self.runs.recomputation(recomputed).whole_s
        return np.asarray(again, dtype=np.float64)

    def _without_tied(self, name: str) -> Floats:
        blocks: Floats = getattr(self.table.blocks, name)
        sizes: Floats = np.add.reduceat(blocks, self.first).astype(np.float64)
        for i, j, held in self.table.runs.ties:
            # A parameter that stages of one rank share is resident once on it.
            first, second = np.searchsorted(self.cuts, (i, j), side="right") - 1
            sizes[second] -= held.get(name, 0.0) * (self.homes[first] == self.homes[second])
        return sizes

    def levels(self, choices: tuple[Recompute, ...]) -> RecomputeLevels:
        """Return how much the ranks may recompute, of these choices."""
        if choices not in self._levels:
            self._levels[choices] = RecomputeLevels(
                table=self.table,
                cuts=self.cuts,
                homes=self.homes,
                choices=choices,
                polls=self.polls,
            )
        return self._levels[choices]


@dataclass(frozen=True, kw_only=True, eq=False)
class InterleavedStages:
    """An even cut as ranks of a configuration hold it."""

    ranks: RankStages
    cut: EvenCut

    @classmethod
    def between(cls, ranks: RankStages, cuts: tuple[int, ...]) -> InterleavedStages:
        """Return the stages between these cuts."""
        of = ranks.configuration
        homes = np.asarray(stage_to_pp_rank(of.schedule, of.pp, of.vpp))
        cut = EvenCut(table=ranks.table, cuts=cuts, homes=homes, polls=ranks.polls)
        return cls(ranks=ranks, cut=cut)

    @property
    def configuration(self) -> Configuration:
        """Degrees, schedule, microbatches."""
        return self.ranks.configuration

    @property
    def table(self) -> StageTable:
        """The layout's table."""
        return self.ranks.table

    @cached_property
    def _ahead_s(self) -> Floats:
        """Most seconds of each stage's backward that may come after its gradient is sent on."""
        return np.add.reduceat(self.ranks.ahead_s, self.cut.first)

    @property
    def least_step_s(self) -> float:
        """A step time that the stages cannot beat, whatever they exchange and recompute."""
        ranks, of = self.ranks, self.configuration
        # Replicas and ZeRO stages by the dozen share it.
        key = of.num_microbatches, of.splits_backward, ranks.replication.is_sharded, ranks.choices
        if key not in self.cut.least_step_s:
            self.cut.least_step_s[key] = self._least_step_s(0.0)
        return self.cut.least_step_s[key]

    def least_recomputed_s(self, again_s: Floats) -> float:
        """Return a step time that the stages cannot beat, whatever they exchange, when
        recomputation adds so much to each backward, by stage.
        """
        return self._least_step_s(again_s)

    def _least_step_s(self, again: Floats | float) -> float:
        nothing, runs = np.zeros(1), self.cut.runs
        seconds = StageSeconds(
            forward_s=runs.times.whole_forward_s,
            backward_s=runs.times.whole_backward_s + again,
            ahead_s=self._ahead_s,
            transfer_s=nothing, back_transfer_s=nothing, tail_s=nothing,
        )  # fmt: skip
        return self._start_s + least_end_s(self.configuration, self.cut.homes, seconds)

    def step_bound(self, again_s: Floats) -> float:
        """Return the same with what they exchange and update, and transfers between them."""
        seconds = self.seconds(again_s)
        return self._start_s + least_end_s(self.configuration, self.cut.homes, seconds)

    def copied_bound(self, recomputed: Sequence[Recompute], copied: Sequence[CopiedRow]) -> float:
        """Return the same when the blocks recompute this, with these jobs of each rank beside
        copies.
        """
        seconds = self.seconds(self.cut.again_s(recomputed))
        copies_s = self._copies_s(recomputed, seconds, copied)
        return self._start_s + least_end_s(self.configuration, self.cut.homes, seconds, copies_s)

    def _copies_s(
        self, recomputed: Sequence[Recompute], seconds: StageSeconds, copied: Sequence[CopiedRow]
    ) -> Floats:
        """Return by how much copies lengthen each rank's jobs."""
        # What the blocks keep is moved, side inputs apart: they come with the batch.
        runs = self.cut.runs
        down_s, up_s = self.table.copies_s(self.table.runs.kept(runs.start, runs.end, recomputed))
        job_s = seconds_by_kind(seconds.forward_s, seconds.backward_s, self._costs.weight_s)
        return np.array([extra_s(row.whole, job_s, down_s, up_s) for row in copied])

    @property
    def _start_s(self) -> float:
        return self.table.least_inputs_s(self.configuration)

    @cached_property
    def _costs(self) -> StageCosts:
        """What the stages cost, with what replicas exchange."""
        return StageCosts(runs=self.cut.runs, replication=self.ranks.replication)

    def seconds(self, again_s: Floats, back_transfer_s: Floats | None = None) -> StageSeconds:
        """Return what the stages take when recomputation adds so much to each backward, by stage:
        with what replicas exchange, transfers between stages and the optimizer. `back_transfer_s`
        (n + 1) are, if not the table's own, those of gradients from a stage starting at each block.
        """
        cut, costs = self.cut, self._costs
        forward_s, backward_s = costs.forward_s, costs.bare_backward_s + again_s
        transfer_s, own_back_s = self.table.transfers_s(self.configuration)
        if back_transfer_s is None:
            back_transfer_s = own_back_s
        if (pp_group := self.ranks.pp_group) is not None:
            # On the way, transfers that do not overlap are part of the jobs that wait for them.
            execution, receive_s = self.table.costs.execution, cut.runs.receive_s(pp_group)
            there_s, back_s = transfers(execution, receive_s)[1]
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
            transfer_s, back_transfer_s = 0 * transfer_s, 0 * back_transfer_s
        # A stage on the rank of the one before receives nothing.
        moves = np.append(True, cut.homes[1:] != cut.homes[:-1])
        # Gradients are exchanged stage by stage; the optimizer updates a rank's weights at once.
        return StageSeconds(
            forward_s=forward_s,
            backward_s=backward_s,
            ahead_s=self._ahead_s,
            transfer_s=transfer_s[cut.first] * moves,
            back_transfer_s=back_transfer_s[cut.first] * moves,
            tail_s=cut.by_rank(costs.after_s)
            + [costs.prices.update_s(*rank) for rank in cut.rank_tensors],
        )

    @property
    def levels(self) -> RecomputeLevels:
        """How much the ranks may recompute."""
        return self.cut.levels(self.ranks.choices)

    def least_levels(
        self, memory_limit_bytes: float, infeasible: Sequence[InfeasibleStage] = ()
    ) -> NDArray[np.intp] | None:
        """Return each rank's level of recomputation, or None when a rank cannot hold its stages.

        A level may fit where a lower bound of the rank's bytes does: its parameters, and its
        microbatch-stages in flight times what its smallest stage saves. `infeasible` are levels
        that were found too large all the same, on the rank of their stage.
        """
        levels = self.levels
        lowest = np.zeros(self.cut.pp, dtype=np.intp)
        # Of ranks with several stages `choice` is a level: that one and all below do not fit.
        for too_large in infeasible:
            rank = self.cut.homes[too_large.stage]
            lowest[rank] = max(lowest[rank], too_large.choice + 1)
        fits = self.least_kept <= self._bare_ranks.most_saved(memory_limit_bytes)
        found = levels.lowest(fits, lowest)
        return None if (found > levels.most).any() else found

    @property
    def least_kept(self) -> Floats:
        """What each rank keeps at once at each level, at least (level, rank)."""
        # Replicas and ZeRO stages by the dozen share it.
        key = self.configuration.num_microbatches, self.ranks.choices
        if key not in self.cut._least_kept:
            # As many microbatch-stages as are in flight, each at the rank's smallest stage; or
            # those before the first backward, each at its own.
            levels = self.levels
            kept = np.maximum(self._live * levels.least_kept, self._kept_before_backward(levels))
            self.cut._least_kept[key] = kept
        return self.cut._least_kept[key]

    def levels_too_low(
        self, levels: NDArray[np.intp], memory_limit_bytes: float
    ) -> tuple[InfeasibleStage, ...]:
        """Return, for each rank that is over the limit with what its job table has in flight, the
        highest level at which it is.
        """
        if self.table.on_host.activations:
            # Microbatches alive in the job table may be on
            # the host: they prove nothing of the device.
            return ()
        least = self.levels.lowest(self._needed <= memory_limit_bytes, levels)
        return tuple(
            self.too_low(int(rank), int(least[rank]) - 1) for rank in np.flatnonzero(least > levels)
        )

    def levels_that_free_less(
        self, levels: NDArray[np.intp], over_bytes: Floats
    ) -> tuple[InfeasibleStage, ...]:
        """Return, for each rank that is over its memory by so many bytes, the highest level that
        frees less than these by what its job table has in flight: no proof that it does not fit.
        """
        ranks = np.flatnonzero(over_bytes > 0)
        freed = self._needed[levels, np.arange(self.cut.pp)] - self._needed
        least = self.levels.lowest(freed >= over_bytes, levels + (over_bytes > 0))
        return tuple(self.too_low(int(rank), int(least[rank]) - 1) for rank in ranks)

    @cached_property
    def _needed(self) -> Floats:
        """Bytes of each rank at each level with what its job table has in flight (level, rank)."""
        live = live_microbatches(self.configuration.pipeline)
        held = live.most_held(self.levels.kept, self._gradient_bytes)
        return self._bare_ranks.with_saved(held)

    def too_low(self, rank: int, level: int) -> InfeasibleStage:
        """Return that a rank does not fit at a level, nor below."""
        stage = int(np.flatnonzero(self.cut.homes == rank)[0])
        first, end = self.cut.cuts[stage], self.cut.cuts[stage + 1]
        return InfeasibleStage(stage=stage, first=first, end=end, choice=level)

    @cached_property
    def least_bytes(self) -> Floats:
        """What each rank needs at least, by (recompute choice, rank): its parameters, and what each
        stage keeps while its microbatches are under way.
        """
        cut, sums = self.cut, map(self.table.runs.kept_sums, self.ranks.choices)
        # Neighbours may share outputs.
        kept = np.stack([np.diff(along[list(cut.cuts)]) for along in sums])
        if not self.table.on_host.activations:
            live = live_microbatches(self.configuration.pipeline)
            return self._bare_ranks.with_saved(live.most_held(kept, self._gradient_bytes))
        least = np.stack([kept[:, cut.homes == r].min(axis=1) for r in range(cut.pp)], axis=1)
        return self._bare_ranks.with_saved(self._live * least)

    def _kept_before_backward(self, levels: RecomputeLevels) -> Floats:
        """Return what the forwards before each rank's first backward keep (level, rank); 0 where
        their number is not stated, or activations are on the host.
        """
        warmup = warmup_of(self.configuration.pipeline)
        if not warmup or self.table.on_host.activations:
            return np.zeros(1)
        # (stage, rank) How many microbatches of the stage its rank holds.
        held = np.zeros((len(warmup), self.cut.pp))
        held[np.arange(len(warmup)), self.cut.homes] = warmup
        return levels.kept @ held

    @property
    def _live(self) -> Floats:
        """How many microbatch-stages each rank has on the device at once, at least."""
        in_flight = np.asarray(whole_stages_of(self.configuration), dtype=float)
        return live_on_device(in_flight, on_host=self.table.on_host.activations)

    @property
    def _gradient_bytes(self) -> Floats:
        """What the gradients of each stage take from its first backward on, at least."""
        stages = rank_bound(self.table, self.configuration, self.cut.stage_params)
        before, after = Phase.BEFORE_BACKWARD, Phase.AFTER_BACKWARD
        more: Floats = stages.trained_bytes(after) - stages.trained_bytes(before)
        return more

    @cached_property
    def _bare_ranks(self) -> RankBound:
        """The ranks with nothing but their parameters."""
        return rank_bound(self.table, self.configuration, self.cut.rank_params)


def least_end_s(
    configuration: Configuration,
    homes: NDArray[np.intp],
    seconds: StageSeconds,
    copies_s: Floats | float = 0.0,
) -> float:
    """Return when a step ends at the earliest, whatever job table of the schedule's kind is run.

    end(r) = fill(r) + m * work(r) + copies(r) + drain(r) + tail

        fill    forwards and transfers of the first microbatch through the stages before rank r's
                first one: until then rank r has nothing to run
        work    forwards and backwards of all stages of the rank, for each of m microbatches
        copies  by how much copies of activations to the host and back lengthen the rank's jobs
        drain   backwards and transfers of the last gradient through those stages to rank 0, without
                what each stage may put after it sends its gradient; then rank 0 runs its own rest.
                0 where weight gradients are jobs of their own, which may come last
        tail    gradient exchange and optimizer, of the rank itself or, after a drain, of rank 0
    """
    pp = configuration.pp
    forward_s, backward_s, ahead_s = seconds.forward_s, seconds.backward_s, seconds.ahead_s
    work = np.bincount(homes, weights=forward_s + backward_s)
    # Rank r's first stage is r under loop and fold placements alike.
    # (rank) Forwards of the stages before, transfers into these and into the rank's own.
    fill = forward_s.cumsum()[:pp] - forward_s[:pp] + seconds.transfer_s.cumsum()[:pp]
    own = fill + configuration.num_microbatches * work + copies_s
    ends = own + seconds.tail_s
    if not configuration.splits_backward:
        inputs = backward_s - ahead_s
        drain = inputs.cumsum()[:pp] - inputs[:pp] + seconds.back_transfer_s.cumsum()[:pp]
        # Rank 0 sends its gradient to no other rank: it runs the whole backward of stage 0.
        drain += ahead_s[0]
        # The last backward of a rank may be of any of its stages.
        most_ahead = np.zeros(pp)
        np.maximum.at(most_ahead, homes, ahead_s)
        ends = np.maximum(ends, own - most_ahead + drain + seconds.tail_s[0])
    return float(ends.max())
