"""Schedules by name: what each promises, and `build_schedule`.

A schedule is one function from (pp, vpp, num_microbatches) to the jobs of each pp rank.
Anyone may add one:

    @register_schedule("last_first", summary="every forward, then backward from the newest")
    def last_first(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
        order = range(num_microbatches)
        return [
            [forward(rank, i) for i in order] + [full_backward(rank, i) for i in reversed(order)]
            for rank in range(pp)
        ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from planner.errors import ScheduleError
from planner.language.schedule.job_order import JobOrder, PerRank, PerStage, RoundTrips
from planner.language.schedule.jobs import Job, Schedule
from planner.language.schedule.placements import StagePlacement, loop_placement

Builder = Callable[[int, int, int], Iterable[Iterable[Job]]]
"""From (pp, vpp, num_microbatches) to the jobs of each pp rank, in order."""

DEFAULT_SCHEDULE = "1f1b"
"""The schedule of a plan that names none, and of one without a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A named schedule: how it is built, which sizes it accepts, what a search may rely on."""

    name: str
    """What plans, commands and requests call it."""
    summary: str
    """One line for people."""
    build: Builder
    """The jobs of each rank."""
    placement: StagePlacement
    """The pp rank of each stage."""
    min_vpp: int
    """Fewest stages a rank."""
    max_vpp: int | None
    """Most stages a rank; None: any number."""
    fills_pipeline: bool
    """Whether it needs at least one microbatch for each pp rank."""
    splits_backward: bool
    """Whether I and W jobs take the place of some or all B jobs."""
    in_flight_limit: PerRank | None
    """Most live microbatch-stages of each rank: a promise that `validate_schedule` holds the table
    to. None: it is read from the table."""
    round_trips: RoundTrips
    """Which round trips a rank with one stage waits for (`job_order`)."""
    warmup: PerStage | None
    """Forwards of each stage before its rank's first backward (`job_order`)."""
    late_weights: PerRank | None
    """Most W jobs after a rank's last I job (`job_order`); None: not stated."""
    search_rank: int | None
    """Its place among the schedules that a search tries unasked; None: only where it is named."""

    def job_order(self, *, pp: int, num_microbatches: int) -> JobOrder:
        """Return what is stated of its order of jobs, for one stage a rank."""
        return _job_order(self, pp, num_microbatches)

    def why_not(self, *, pp: int, vpp: int, num_microbatches: int) -> str | None:
        """Return why the schedule can't take these sizes, in one line, or None if it can."""
        for label, value in (("pp", pp), ("vpp", vpp), ("num_microbatches", num_microbatches)):
            if value < 1:
                return f"{label}={value} must be at least 1"
        if vpp < self.min_vpp:
            return (
                f"schedule {self.name!r} needs vpp>={self.min_vpp}, vpp={vpp} given; "
                f"use vpp={self.min_vpp} or a schedule without virtual stages such as '1f1b'"
            )
        if self.max_vpp is not None and vpp > self.max_vpp:
            if self.max_vpp == 1:
                return (
                    f"schedule {self.name!r} has no virtual stages, vpp={vpp} given; "
                    "use vpp=1, or a schedule with virtual stages: "
                    + ", ".join(sorted(n for n, s in SCHEDULES.items() if s.max_vpp != 1))
                )
            return f"schedule {self.name!r} takes vpp<={self.max_vpp}, vpp={vpp} given"
        if self.fills_pipeline and num_microbatches < pp:
            return (
                f"num_microbatches={num_microbatches} is fewer than pp={pp} pipeline ranks, so "
                f"schedule {self.name!r} would leave ranks without work; "
                f"use num_microbatches>={pp} or pp<={num_microbatches}"
            )
        return None


@lru_cache(maxsize=4096)
def _job_order(spec: ScheduleSpec, pp: int, num_microbatches: int) -> JobOrder:
    def of_ranks(counts: PerRank | PerStage | None) -> tuple[int, ...]:
        return counts(pp, 1, num_microbatches) if counts and spec.min_vpp == 1 else ()

    return JobOrder(
        round_trips=spec.round_trips,
        warmup=of_ranks(spec.warmup),
        splits_backward=spec.splits_backward,
        late_weights=of_ranks(spec.late_weights),
    )


SCHEDULES: dict[str, ScheduleSpec] = {}
"""Every schedule known by name, filled by `register_schedule`."""


def register_schedule(
    name: str,
    *,
    summary: str = "",
    placement: StagePlacement = loop_placement,
    min_vpp: int = 1,
    max_vpp: int | None = 1,
    fills_pipeline: bool = True,
    splits_backward: bool = False,
    in_flight_limit: PerRank | None = None,
    round_trips: RoundTrips = RoundTrips.UNKNOWN,
    warmup: PerStage | None = None,
    late_weights: PerRank | None = None,
    search_rank: int | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that makes a builder known as `name`; see `ScheduleSpec`.

    Raises ScheduleError when the name is taken, for a table that changes meaning under a
    plan already written is worse than a refusal, and when `round_trips` needs a `warmup`.
    """
    if name in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is registered already; give yours another name")
    if round_trips is RoundTrips.FIRST_AND_LAST and warmup is None:
        raise ScheduleError(
            f"schedule {name!r} waits for its {round_trips} round trips; give its warmup too, the "
            "forwards of each rank before its first backward"
        )

    def register(build: Builder) -> Builder:
        SCHEDULES[name] = ScheduleSpec(
            name=name,
            summary=summary,
            build=build,
            placement=placement,
            min_vpp=min_vpp,
            max_vpp=max_vpp,
            fills_pipeline=fills_pipeline,
            splits_backward=splits_backward,
            in_flight_limit=in_flight_limit,
            round_trips=round_trips,
            warmup=warmup,
            late_weights=late_weights,
            search_rank=search_rank,
        )
        return build

    return register


def searched_schedules() -> tuple[str, ...]:
    """Return the schedules that a search tries unasked, in their order.

    Left out are those that hold every microbatch before the first backward, or go through them
    breadth first: they keep more memory for no less time.
    """
    ranked = [(spec.search_rank, name) for name, spec in SCHEDULES.items()]
    return tuple(name for _, name in sorted((r, n) for r, n in ranked if r is not None))


def find_schedule(name: str) -> ScheduleSpec:
    """Return the spec of a name; raise ScheduleError naming the valid and the nearest ones."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    simple = {_simplified(known): known for known in SCHEDULES}
    near = get_close_matches(_simplified(name), simple, n=1, cutoff=0.5)
    hint = f"did you mean {simple[near[0]]!r}? " if near else ""
    raise ScheduleError(
        f"schedule {name!r} is unknown; {hint}valid names: {', '.join(sorted(SCHEDULES))}; "
        "one of your own comes with `plugin`"
    )


def _simplified(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def build_schedule(name: str, *, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Return the table of a named schedule.

    Raises ScheduleError for an unknown name or sizes it does not take. The table is not
    checked here (`validate_schedule` does), so that a search may build many.
    """
    spec = find_schedule(name)
    reason = spec.why_not(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    if reason is not None:
        raise ScheduleError(reason)
    return Schedule(
        name=name,
        stage_to_pp_rank=spec.placement(pp, vpp),
        num_microbatches=num_microbatches,
        jobs=tuple(tuple(row) for row in spec.build(pp, vpp, num_microbatches)),
    )


def stage_to_pp_rank(name: str, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the pp rank of each of the pp * vpp stages under a named schedule."""
    return find_schedule(name).placement(pp, vpp)
