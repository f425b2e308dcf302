"""The end of a step, from when ranks end their jobs and what they do once: `OnceAStep.last_rank`.

    step_s = inputs_s + max over pp ranks r of  end(r) + after(r) + optimizer(r)

    inputs_s      the batch's way onto the device of the first stage, for which the table waits
    end(r)        the end of r's last job in the table (`planner.language.schedule.simulate`)
    after(r)      what r still has to exchange then with its dp replicas, and with stages that share
                  parameters with its own
    optimizer(r)  its parameter update

Where gradients are clipped, all ranks wait for each other ahead of the optimizer
(`costmodel.time.clipping`). An estimate has a plan's stages, a search only where it has cut them
(`search.partition.quick_step`); both give them as costs by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np

from costmodel.cache import CostCache
from costmodel.time.clipping import ClipSeconds, last_rank, norm_sum_seconds, update_starts
from costmodel.time.offload import least_job_seconds
from costmodel.time.stage_costs.stage_costs import StageCosts, pick
from costmodel.time.tied import tied_seconds
from costmodel.time.update import RankUpdate
from planner.language.schedule.timing.job_table import JobTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRank:
    """The pp rank that ends the step, and when: seconds that add up to the step."""

    end_s: float
    """End of its last job."""
    after_s: float
    """What it exchanges with replicas and with stages that share parameters, after that."""
    clipping_s: float
    """The norm of all gradients, and waiting for other ranks' updates."""
    optimizer_s: float
    """Its own update."""
    inputs_s: float
    """The batch's way onto the first stage's device, before all jobs."""

    @property
    def before_clipping_s(self) -> float:
        """Seconds from the first job to the end of the step, but for clipping."""
        return self.end_s + self.after_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.inputs_s + self.before_clipping_s + self.clipping_s


@dataclass(frozen=True, kw_only=True)
class OnceAStep:
    """What is done once a step, whatever the order of jobs; sequences have an entry a pp rank."""

    inputs_s: float
    """The batch's way onto the first stage's device, before all jobs."""
    exchange_s: tuple[float, ...]
    """What ranks exchange with their replicas after their last jobs."""
    tied_s: tuple[float, ...]
    """What they spend on gradients of parameters that they share with other pp ranks."""
    updates: tuple[RankUpdate, ...]
    """Clipping and optimizer."""
    norm_sum_s: float | None
    """The sum of all ranks' norms; None where gradients are not clipped."""

    @property
    def after_s(self) -> tuple[float, ...]:
        """What ranks exchange after their last jobs in all."""
        return tuple(map(add, self.tied_s, self.exchange_s))

    def last_rank(self, rank_end_s: Sequence[float]) -> LastRank:
        """Return the rank that ends the step, where ranks end their last jobs at these times."""
        rank, clipping_s = last_rank(
            self._ready_s(rank_end_s),
            [update.optimizer_s for update in self.updates],
            self._clips,
            norm_sum_s=self.norm_sum_s or 0.0,
        )
        return LastRank(
            end_s=rank_end_s[rank],
            after_s=self.after_s[rank],
            clipping_s=clipping_s,
            optimizer_s=self.updates[rank].optimizer_s,
            inputs_s=self.inputs_s,
        )

    def update_starts(self, rank_end_s: Sequence[float]) -> list[float]:
        """Return when ranks begin their updates that end their last jobs at these times."""
        return update_starts(
            self._ready_s(rank_end_s), self._clips, norm_sum_s=self.norm_sum_s or 0.0
        )

    def _ready_s(self, rank_end_s: Sequence[float]) -> list[float]:
        return list(map(add, rank_end_s, self.after_s))

    @property
    def _clips(self) -> list[ClipSeconds]:
        return [] if self.norm_sum_s is None else [update.clip for update in self.updates]


def once_a_step(
    costs: CostCache,
    of_ranks: Sequence[CostCache],
    stages: Sequence[StageCosts],
    homes: Sequence[int],
    *,
    num_ranks: int,
    inputs_s: float,
) -> OnceAStep:
    """Return what is done once in a step of a pipeline on so many ranks, of all its stages.

    `of_ranks` has for each pp rank the prices on its devices, `stages` for each stage the costs of
    all stages under its mesh, and `homes` its pp rank.
    """
    pp = len(of_ranks)
    mine = [np.flatnonzero(np.asarray(homes) == rank) for rank in range(pp)]
    once_s = pick([stage.exposed for stage in stages]).once_s
    return OnceAStep(
        inputs_s=inputs_s,
        exchange_s=tuple(float(once_s[own].sum()) for own in mine),
        tied_s=tied_seconds(of_ranks, stages, homes, num_ranks=num_ranks // pp),
        updates=tuple(_rank_update(stages, own.tolist()) for own in mine),
        norm_sum_s=norm_sum_seconds(costs.profile, num_ranks) if costs.clips_gradients else None,
    )


def _rank_update(stages: Sequence[StageCosts], own: Sequence[int]) -> RankUpdate:
    """Return the update of a rank, of all its stages at once."""
    columns = zip(*([column[s] for column in stages[s].updated] for s in own), strict=True)
    return stages[own[0]].prices.update(*(float(sum(column)) for column in columns))


def copies_beside_jobs(
    of_ranks: Sequence[CostCache], table: JobTable, kept_bytes: Mapping[int, float]
) -> tuple[np.ndarray, ...] | None:
    """Return what copies of activations take beside each job of each rank, if there are any.

    `kept_bytes` are what a microbatch keeps on each stage whose activations go to the host: without
    shared side inputs, which belong to other stages, too, and stay on the device.
    """
    if not kept_bytes:
        return None
    rows = zip(of_ranks, table.schedule.jobs, table.offloads(frozenset(kept_bytes)), strict=True)
    return tuple(
        least_job_seconds(costs.profile, len(row), offloads, kept_bytes)
        for costs, row, offloads in rows
    )
