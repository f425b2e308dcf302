"""Microbatches in flight: how many a stage or a rank holds at its worst moment."""

from __future__ import annotations

from functools import lru_cache

from planner.schedule import find_schedule, in_flight, in_flight_per_stage
from search.bounds.quick_price import job_table
from search.space.shapes import Configuration


def in_flight_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the most microbatches that each stage holds, by the schedule's limit or its table."""
    limit = find_schedule(configuration.schedule).in_flight_limit
    if configuration.vpp == 1 and limit is not None:
        return tuple(limit(configuration.pp, configuration.vpp, configuration.num_microbatches))
    return _in_flight_of_table(*configuration.pipeline)


def live_stages_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the most microbatch-stages alive on each pp rank, all its stages together."""
    limit = find_schedule(configuration.schedule).in_flight_limit
    if limit is not None:
        return tuple(limit(configuration.pp, configuration.vpp, configuration.num_microbatches))
    return _live_of_table(*configuration.pipeline)


@lru_cache(maxsize=1024)
def _live_of_table(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return in_flight(job_table(schedule, pp, vpp, num_microbatches).schedule)


@lru_cache(maxsize=1024)
def _in_flight_of_table(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return in_flight_per_stage(job_table(schedule, pp, vpp, num_microbatches).schedule)
