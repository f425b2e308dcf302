"""What a request without any shape could be instead: each answer was tried and has shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.errors import PlannerError
from search.request import CHOICES, SearchRequest

_MOST_BATCHES, _MOST_COUNTS = 8, 64
"""How many global batches, and how many numbers of devices, are tried."""


def fixed_choices(request: SearchRequest) -> list[str]:
    """Return the names of what a request fixes, rules out or narrows down."""
    named = [name for name in (*CHOICES, "split_rank") if getattr(request, name) is not None]
    lists = ("balance", "pins", "forbid", "allow")
    return named + [name for name in lists if getattr(request, name)]


def tried_changes(
    request: SearchRequest, has_shapes: Callable[[SearchRequest], bool]
) -> tuple[str, ...]:
    """Return what to change so that there are shapes, in words: each alone is enough.

    `has_shapes` may raise what is wrong with a request.
    """

    def works(**changes: object) -> bool:
        try:
            return has_shapes(replace(request, **changes))  # type: ignore[arg-type]
        except PlannerError:
            return False

    found = []
    for name in fixed_choices(request):
        if works(**{name: () if isinstance(getattr(request, name), tuple) else None}):
            found.append(f"leave `{name}` out")
    batch = next((size for size in _batches(request) if works(global_batch=size)), None)
    if batch is not None:
        found.append(f"take `global_batch` {batch}")
    count = next((count for count in _counts(request) if works(num_devices=count)), None)
    if count is not None:
        found.append(f"take `num_devices` {count}")
    return tuple(found)


def advised(changes: tuple[str, ...]) -> str:
    """Return tried changes as the end of a refusal."""
    if not changes:
        return (
            "no change of a single choice, of `global_batch` or of `num_devices` was found that "
            "does; leave several choices out"
        )
    *others, last = changes
    return f"{', '.join(others)} or {last}" if others else last


def _batches(request: SearchRequest) -> Iterator[int]:
    """Yield larger global batches that many degrees divide, the smallest first."""
    given, devices = request.global_batch, request.num_devices
    first = given // devices + 1
    yield from (times * devices for times in range(first, first + _MOST_BATCHES))


def _counts(request: SearchRequest) -> Iterator[int]:
    """Yield other numbers of devices: fewer, from the largest, then more."""
    given = request.num_devices
    yield from range(given - 1, max(0, given - 1 - _MOST_COUNTS), -1)
    yield from range(given + 1, given + 1 + _MOST_COUNTS)
