"""Python's cyclic collector, held back while much is made that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Hold back the cyclic collector: where objects are only added, scanning them again and again
    finds nothing (15% of a search, 25% of a capture).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_YOUNG, _MIDDLE, _OLD = 50_000, 20, 20
"""Objects made until a short-lived command looks for cycles among them, and of how many such looks
one goes further back. Python's own 700, 10, 10 look a thousand times while torch is imported."""


def collect_seldom() -> None:
    """Look for cycles seldom in what follows: an import makes a million objects that stay."""
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def leave_to_the_system() -> None:
    """Take what there is out of the collector's sight, as a process ends: at exit Python would go
    through all of it several times to free what the system frees with the process.
    """
    gc.freeze()
