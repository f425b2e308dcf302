"""What follows from job tables of configurations; the last answers are kept.

A table depends on the `Pipeline` alone: schedule, pp, vpp and microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time
from planner.language.schedule import find_schedule
from planner.language.schedule.jobs import JobKind
from planner.language.schedule.registry import stage_to_pp_rank
from planner.language.schedule.timing.in_flight import in_flight, in_flight_per_stage
from planner.language.schedule.timing.job_table import job_table
from search.bounds.copied_jobs import CopiedRow
from search.space.configuration import Configuration, Pipeline

_MAKE_GRADIENTS = JobKind.FULL_BACKWARD, JobKind.BACKWARD_WEIGHT
"""Jobs after which a stage has gradients of all its parameters."""


@lru_cache(maxsize=1024)
def copied_rows(pipeline: Pipeline) -> tuple[CopiedRow, ...]:
    """Return each rank's jobs beside which activations are copied, where all stages' are."""
    table = job_table(*pipeline)
    found = table.offloads(frozenset(range(pipeline.pp * pipeline.vpp)))
    return tuple(map(CopiedRow.of, table.schedule.jobs, found))


@dataclass(frozen=True, slots=True, eq=False)
class LiveMicrobatches:
    """What a rank holds at once of each of its stages, by rank: the stages, and a row for each
    different state after a forward: how many microbatches, and whether (1 or 0) sums of gradients.
    """

    by_rank: tuple[tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]], ...]

    def most_held(
        self, kept_bytes: NDArray[np.float64], gradient_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the most that each rank holds at once (level, rank), as
        `planner.language.schedule.most_kept`, if a microbatch keeps so many bytes (level, stage)
        and the gradients of a stage take so many (stage).
        """
        # (level, stage) @ (stage, state): the fullest state of each rank counts.
        most = [
            (kept_bytes[:, stages] @ live.T + summed @ gradient_bytes[stages]).max(axis=1)
            for stages, live, summed in self.by_rank
        ]
        return np.stack(most, axis=1)


@lru_cache(maxsize=128)
def live_microbatches(pipeline: Pipeline) -> LiveMicrobatches:
    """Return what is in flight at once on each rank of a schedule."""
    table = job_table(*pipeline)
    num_stages, by_rank = table.schedule.num_stages, []
    for row in table.rows:
        check_time()
        kind, stage = row.kinds(num_stages)
        stages = np.unique(stage)
        # (job, stage of the rank) from here on.
        own = stage[:, None] == stages
        is_forward, is_weight = kind == JobKind.FORWARD, kind == JobKind.BACKWARD_WEIGHT
        # What is certain: an I job frees, so its W job has nothing left to free.
        change = np.where(is_forward, 1, np.where(is_weight, 0, -1))
        live = np.cumsum(own * change[:, None], axis=0)
        # What makes a stage's gradients: full backwards, or jobs of weight gradients.
        made = np.cumsum(own & np.isin(kind, _MAKE_GRADIENTS)[:, None], axis=0)
        # The last one leaves the shards alone that a rank updates.
        summed = (made > 0) & (made < made[-1])
        # Only a forward can raise what is kept, and most states come again with each microbatch.
        states = np.unique(np.hstack([live, summed])[is_forward], axis=0).astype(np.float64)
        by_rank.append((stages, states[:, : len(stages)], states[:, len(stages) :]))
    return LiveMicrobatches(tuple(by_rank))


@lru_cache(maxsize=1024)
def warmup_of(pipeline: Pipeline) -> tuple[int, ...]:
    """Return how many forwards of each stage its rank runs before its first backward, at least: all
    that they keep is held at once. Empty where nothing is stated of it.
    """
    stated = find_schedule(pipeline.schedule).warmup
    return stated(*pipeline[1:]) if stated else ()


def whole_in_flight_of(configuration: Configuration) -> tuple[int, ...]:
    """Return of how many microbatches at once each stage holds all that a forward keeps, at least.

    It holds all of it up to the first backward job. Where weight gradients are jobs of their own, a
    part is held until these; the part may be small, so no bound counts it.
    """
    order = configuration.stated_order
    if not order.splits_backward:
        return in_flight_of(configuration)
    if configuration.vpp == 1 and order.warmup:
        # The forwards ahead of the rank's first backward.
        return order.warmup
    most: dict[int, int] = {}
    for stages, live, _ in live_microbatches(configuration.pipeline).by_rank:
        most.update(zip(stages.tolist(), live.max(axis=0).astype(int).tolist(), strict=True))
    return tuple(most[stage] for stage in sorted(most))


def whole_stages_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the same of all stages of each pp rank together."""
    order = configuration.stated_order
    if not order.splits_backward:
        return live_stages_of(configuration)
    if warmup := warmup_of(configuration.pipeline):
        homes = stage_to_pp_rank(*configuration.pipeline[:3])
        return tuple(np.bincount(homes, weights=warmup).astype(int).tolist())
    by_rank = live_microbatches(configuration.pipeline).by_rank
    return tuple(int(live.sum(axis=1).max()) for _, live, _ in by_rank)


def in_flight_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the most microbatches of which each stage holds anything, from the forward to the last
    backward job, by the schedule's limit or its table.
    """
    limit = find_schedule(configuration.schedule).in_flight_limit
    # What the schedule promises spares building its table, and validation holds tables to it.
    if configuration.vpp == 1 and limit is not None:
        return tuple(limit(*configuration.pipeline[1:]))
    return _in_flight_of_table(configuration.pipeline)


def live_stages_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the most microbatch-stages of which each pp rank holds anything."""
    limit = find_schedule(configuration.schedule).in_flight_limit
    if limit is not None:
        return tuple(limit(*configuration.pipeline[1:]))
    return _live_of_table(configuration.pipeline)


@lru_cache(maxsize=1024)
def _live_of_table(pipeline: Pipeline) -> tuple[int, ...]:
    return in_flight(job_table(*pipeline).schedule)


@lru_cache(maxsize=1024)
def _in_flight_of_table(pipeline: Pipeline) -> tuple[int, ...]:
    return in_flight_per_stage(job_table(*pipeline).schedule)
