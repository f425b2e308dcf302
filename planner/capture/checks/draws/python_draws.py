"""Numbers that a forward draws by Python's `random`, and that decide nothing.

Models with `layerdrop` draw a number for each layer, ``random.uniform(0, 1) < self.layerdrop``,
also where that is 0. A draw decides nothing where the forward computes the same whether the number
is the least, the middle or the greatest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_PLACES = (0.0, 0.5, 1 - 2**-53)
"""Of the numbers that `random.random` draws."""


def draws_so_far() -> tuple[Any, ...]:
    """Return what another draw by Python or NumPy would change."""
    return random.getstate(), repr(np.random.get_state(legacy=False))


def decide_nothing(number_of: Callable[[], int], number: int) -> bool:
    """Whether a forward has a number whatever it draws; False where it draws in other ways.

    `number_of` runs it, and returns the number of what it computes.
    """
    before = draws_so_far()
    for place in _PLACES:
        with _drawn_at(place):
            if number_of() != number:
                return False
    return draws_so_far() == before


@contextmanager
def _drawn_at(place: float) -> Iterator[None]:
    given = random.random, random.uniform
    random.random = lambda: place
    random.uniform = lambda a, b: a + (b - a) * place
    try:
        yield
    finally:
        random.random, random.uniform = given
