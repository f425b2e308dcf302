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

from planner.errors import ScheduleError
from planner.schedule.jobs import Job, Schedule
from planner.schedule.placements import StagePlacement, loop_placement

Builder = Callable[[int, int, int], Iterable[Iterable[Job]]]
"""From (pp, vpp, num_microbatches) to the jobs of each pp rank, in order."""

InFlightLimit = Callable[[int, int, int], tuple[int, ...]]
"""From (pp, vpp, num_microbatches) to the live microbatch-stages each pp rank may reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A named schedule, where it places stages, and the sizes it accepts.

    `vpp` is bounded by `min_vpp` and `max_vpp` (None: any). With `fills_pipeline` there must
    be at least one microbatch for each pp rank. `splits_backward` says that I and W jobs take
    the place of some or all B jobs. `in_flight_limit`, where given, is a promise that
    `validate_schedule` holds the table to.
    """

    name: str
    summary: str
    build: Builder
    placement: StagePlacement
    min_vpp: int
    max_vpp: int | None
    fills_pipeline: bool
    splits_backward: bool
    in_flight_limit: InFlightLimit | None

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
    in_flight_limit: InFlightLimit | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that makes a builder known as `name`; see `ScheduleSpec`.

    Raises ScheduleError when the name is taken, for a table that changes meaning under a
    plan already written is worse than a refusal.
    """
    if name in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is registered already; choose another name")

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
        )
        return build

    return register


def find_schedule(name: str) -> ScheduleSpec:
    """Return the spec of a name; raise ScheduleError naming the valid and the nearest ones."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    simple = {_simplified(known): known for known in SCHEDULES}
    near = get_close_matches(_simplified(name), simple, n=1, cutoff=0.5)
    hint = f"did you mean {simple[near[0]]!r}? " if near else ""
    raise ScheduleError(
        f"schedule {name!r} is unknown; {hint}valid names: {', '.join(sorted(SCHEDULES))}"
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
