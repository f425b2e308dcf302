"""Make a job table for stages as they are: uneven, with transfers, under a memory limit.

Fixed tables are made for equal stages. Here a set of greedy rules (`list_scheduler`) and the
fixed tables that fit are simulated with the real times, and the best are improved along their
critical path (`improve`). The result is never slower than a fixed table of the same
placement and memory, and comes with a lower bound on what any table could reach.
`tests/referees/schedules.py` solves small cases exactly, as reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from planner.errors import ScheduleError
from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.language.schedule.registry import SCHEDULES, build_schedule
from planner.language.schedule.synthesis.improve import improve_schedule
from planner.language.schedule.synthesis.list_scheduler import ListScheduler, Rule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate

_NUM_STARTS = 3
"""How many of the best tables are improved."""

_MANY_JOBS = 4_000
"""Above this many jobs the rules are cut to the few that win most often."""

_MOST_JOB_PLAYS = 1_200_000
"""Jobs simulated in all while improving: a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What a table is made for.

    `live_bytes[stage]` is what a live microbatch takes from its F to its last job there, and
    `limit_bytes[pp_rank]` what a rank may hold of it in all (inf: no limit).
    """

    stage_to_pp_rank: tuple[int, ...]
    num_microbatches: int
    times: JobSeconds
    live_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ScheduleError when lengths differ or one microbatch does not fit a rank."""
        num_stages, pp = len(self.stage_to_pp_rank), max(self.stage_to_pp_rank, default=-1) + 1
        lengths = (len(self.times.forward_s), len(self.live_bytes), len(self.limit_bytes))
        if lengths != (num_stages, num_stages, pp) or set(self.stage_to_pp_rank) != set(range(pp)):
            raise ScheduleError(
                f"times of {lengths[0]} stages, live_bytes of {lengths[1]} and limit_bytes of "
                f"{lengths[2]} ranks given for {num_stages} stages on {pp} ranks, "
                "each of which must hold one; give one for each"
            )
        if self.num_microbatches < 1:
            raise ScheduleError(f"num_microbatches={self.num_microbatches} must be at least 1")
        for rank, limit in enumerate(self.limit_bytes):
            needed = self.bytes_of_one(rank)
            if limit < needed:
                raise ScheduleError(
                    f"pp rank {rank} may hold {limit:g} bytes of live microbatches, but one "
                    f"takes {needed:g} on its stages; raise the limit or use smaller microbatches"
                )

    @property
    def pp(self) -> int:
        """Number of pp ranks."""
        return len(self.limit_bytes)

    def bytes_of_one(self, pp_rank: int) -> float:
        """Return what one microbatch takes when live on all stages of a rank."""
        held = zip(self.stage_to_pp_rank, self.live_bytes, strict=True)
        return sum(size for rank, size in held if rank == pp_rank)

    def row_fits(self, row: Sequence[Job]) -> bool:
        """Whether a rank may run this row within its limit."""
        if not row:
            return True
        limit = self.limit_bytes[self.stage_to_pp_rank[row[0].stage_index]] * (1 + 1e-9)
        live = 0.0
        for job in row:
            if job.kind is JobKind.FORWARD:
                live += self.live_bytes[job.stage_index]
                if live > limit:
                    return False
            # After I the activations stay, for W multiplies them by the outputs' gradients.
            elif job.kind is not JobKind.BACKWARD_INPUT:
                live -= self.live_bytes[job.stage_index]
        return True

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank may run its row."""
        return all(map(self.row_fits, schedule.jobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A table made for a pipeline, its step time, where it came from, and a lower bound."""

    schedule: Schedule
    step_s: float
    lower_bound_s: float
    origin: str


def synthesize_schedule(
    pipeline: Pipeline,
    *,
    split_backward: bool | None = None,
    max_evaluations: int = 600,
    name: str = "synthesised",
) -> Synthesis:
    """Return the fastest table found for the pipeline; deterministic.

    `split_backward` says whether backwards are I and W jobs (True), B jobs (False), or
    whichever is faster (None). `max_evaluations` bounds the simulations spent on improving;
    large tables get fewer.
    """
    num_jobs = 3 * len(pipeline.stage_to_pp_rank) * pipeline.num_microbatches
    # A simulation takes time in proportion to the table's jobs: large tables get fewer of them.
    max_evaluations = min(max_evaluations, _MOST_JOB_PLAYS // num_jobs)
    bound = lower_bound_s(pipeline, split_backward=split_backward is not False)
    found: dict[tuple[tuple[Job, ...], ...], tuple[float, str, Schedule]] = {}
    for origin, schedule in _candidates(pipeline, split_backward):
        if schedule.jobs not in found:
            step_s = simulate(schedule, pipeline.times, links="free").makespan_s
            found[schedule.jobs] = (step_s, origin, schedule)
            # At the lower bound no other table can be faster.
            if step_s <= bound * (1 + 1e-9):
                break
    starts = sorted(found.values(), key=lambda entry: entry[:2])[:_NUM_STARTS]
    best = starts[0]
    for seed, (_, origin, schedule) in enumerate(starts):
        if best[0] <= bound * (1 + 1e-9) or max_evaluations <= 0:
            break
        improved = improve_schedule(
            schedule,
            pipeline.times,
            fits=pipeline.row_fits,
            max_evaluations=max_evaluations // len(starts),
            target_s=bound,
            seed=seed,
        )
        step_s = simulate(improved, pipeline.times, links="free").makespan_s
        if step_s < best[0]:
            best = (step_s, origin if improved is schedule else f"{origin}, improved", improved)
    step_s, origin, schedule = best
    return Synthesis(
        schedule=replace(schedule, name=name), step_s=step_s, lower_bound_s=bound, origin=origin
    )


def lower_bound_s(pipeline: Pipeline, *, split_backward: bool = True) -> float:
    """Return a time no table of the pipeline can beat.

    A rank works on all microbatches, starts no earlier than the first gets to it, and after
    its last gradient that gradient still has to go through the stages before.
    """
    times, placed = pipeline.times, pipeline.stage_to_pp_rank
    kinds, (into_s, back_s) = times.by_kind(), times.between_ranks(placed)
    gradient = kinds[JobKind.BACKWARD_INPUT if split_backward else JobKind.FULL_BACKWARD]
    num_stages, m = len(placed), pipeline.num_microbatches
    fill, drain = [0.0], [0.0]  # time before the first F, and after the last gradient, of a stage
    for stage in range(1, num_stages):
        fill.append(fill[-1] + times.forward_s[stage - 1] + into_s[stage])
        drain.append(drain[-1] + gradient[stage - 1] + back_s[stage - 1])
    # Split, gradients pass the earlier stages without waiting for their W; of W jobs only the last
    # of stage 0 is sure to come after its gradient.
    weight_s = times.backward_weight_s if split_backward else (0.0,) * num_stages
    last_weight_s = weight_s[0]
    chain = fill[-1] + times.forward_s[-1] + gradient[-1] + drain[-1] + last_weight_s
    bounds = [chain]
    for rank in range(pipeline.pp):
        stages = [s for s in range(num_stages) if placed[s] == rank]
        # The rank begins with whichever of its stages the first microbatch gets to first.
        start = min(fill[s] for s in stages)
        before_drain = m * sum(times.forward_s[s] + gradient[s] for s in stages)
        all_work = before_drain + m * sum(weight_s[s] for s in stages)
        # The rank's last gradient passes the stages before it; then stage 0 still has its W to run.
        # A rank that holds stage 0 itself (last = 0) counts that W in all_work.
        last = min(drain[s] for s in stages)
        bounds.append(start + max(all_work, before_drain + last + last_weight_s * (last > 0)))
    return max(bounds)


def _candidates(pipeline: Pipeline, split_backward: bool | None) -> Iterator[tuple[str, Schedule]]:
    """Yield (origin, table) of each fixed table that fits and of each greedy rule and limit."""
    num_stages, pp = len(pipeline.stage_to_pp_rank), pipeline.pp
    vpp, remainder = divmod(num_stages, pp)
    for name, spec in SCHEDULES.items():
        sizes = {"pp": pp, "vpp": vpp, "num_microbatches": pipeline.num_microbatches}
        if (
            remainder
            or spec.why_not(**sizes)
            or spec.placement(pp, vpp) != pipeline.stage_to_pp_rank
            or (split_backward is not None and spec.splits_backward != split_backward)
        ):
            continue
        schedule = build_schedule(name, **sizes)
        if pipeline.fits(schedule):
            yield name, schedule
    splits = (True, False) if split_backward is None else (split_backward,)
    few = 3 * num_stages * pipeline.num_microbatches > _MANY_JOBS
    for split, limits in product(splits, _limits(pipeline, few=few)):
        for rule in _rules(split, chunked=vpp > 1, few=few):
            greedy = ListScheduler(
                stage_to_pp_rank=pipeline.stage_to_pp_rank,
                num_microbatches=pipeline.num_microbatches,
                times=pipeline.times,
                live_bytes=pipeline.live_bytes,
                limit_bytes=limits,
                rule=rule,
            )
            yield "greedy", greedy.run("greedy")


def _rules(split: bool, *, chunked: bool, few: bool) -> Iterator[Rule]:
    choices = product((True, False), (False, True) if chunked else (False,), (0.0, 0.5, 1.0))
    for backward_first, oldest_first, patience in choices:
        if few and (patience == 1.0 or (patience and not backward_first)):
            continue
        yield Rule(
            backward_first=backward_first,
            oldest_first=oldest_first,
            patience=patience,
            split_backward=split,
        )


def _limits(pipeline: Pipeline, *, few: bool) -> list[tuple[float, ...]]:
    """Return the memory limits to try: the given one, and tighter ones.

    A rank that may take less starts its backwards sooner. What just keeps it busy is a round
    trip from it to the last stage and back, counted in steps of the slowest rank.
    """
    limits = [pipeline.limit_bytes]
    times, placed, pp = pipeline.times, pipeline.stage_to_pp_rank, pipeline.pp
    work = [0.0] * pp
    for stage, rank in enumerate(placed):
        work[rank] += (
            times.forward_s[stage] + times.backward_input_s[stage] + times.backward_weight_s[stage]
        )
    slowest = max(work)
    # A tighter limit changes the order only where memory would let a rank run far ahead.
    if few or slowest <= 0:
        return limits
    into_s, back_s = times.between_ranks(placed)
    for extra in (0, 1, 2):
        tighter = []
        for rank in range(pp):
            first = placed.index(rank)
            jobs_s = sum(
                times.forward_s[s] + times.backward_input_s[s] + times.backward_weight_s[s]
                for s in range(first, len(placed))
            )
            round_s = jobs_s + (sum(into_s[first + 1 :]) + sum(back_s[first:]))
            # A microbatch comes out of the slowest rank every `slowest` seconds: so many are under
            # way during a round trip.
            count = ceil(round_s / slowest - 1e-9) + extra
            least_bytes = pipeline.bytes_of_one(rank)
            tighter.append(max(least_bytes, min(pipeline.limit_bytes[rank], count * least_bytes)))
        if tuple(tighter) not in limits:
            limits.append(tuple(tighter))
    return limits
