"""What tensors of this process take of its memory, to the byte and on all threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.native import built


def start_count() -> None:
    """Count from here on: what is alive already is not counted, nor when it goes."""
    _count()


def most_bytes(run: Callable[[], Any], *, times: int = 1) -> int:
    """Return the most bytes that tensors take in a call, above what they take at its start: the
    least of several `times`, as a thread of a collective may free late what it sent.
    """
    count = _count()
    found = []
    for _ in range(times):
        count.take_most_bytes()
        before = count.alive_bytes()
        run()
        found.append(count.take_most_bytes() - before)
    return min(found)


@cache
def _count() -> ctypes.CDLL:
    count = ctypes.CDLL(str(built(Path(__file__).with_suffix(".cpp"))))
    count.alive_bytes.restype = count.take_most_bytes.restype = ctypes.c_longlong
    count.start_count()
    return count
