"""Random numbers of data: they follow from a seed and a place, and from no process.

Ranks deal one order among each other, and a training that goes on from a checkpoint makes it again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_of(*numbers: int) -> int:
    """Return a seed that follows from some numbers, and from no process."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        # The finaliser of splitmix64 (Steele et al. 2014): every bit of a number moves all.
        mixed = (mixed + number) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the script's random generators as they were."""
    held = _states()
    try:
        yield
    finally:
        _set_states(held)


def draw_from(*numbers: int) -> None:
    """Let random numbers follow from some numbers; call it where `generators_kept`.

    So what a dataset draws for a sample is the same on all ranks that read it, by whichever worker,
    and when it is read again after a checkpoint. Generators of a dataset's own are its own affair.
    """
    seed, numpy = seed_of(*numbers), sys.modules.get("numpy")
    # By name: torch.manual_seed would seed devices, too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def drawn_from(sampler: Iterable[Any], *numbers: int) -> Iterator[Any]:
    """Yield what a sampler does; what it draws follows from some numbers, whenever it is drawn.

    A generator that it has itself (`sampler.generator`, as PyTorch's have) is seeded by them, too.
    """
    for own in _generators_of(sampler):
        own.manual_seed(seed_of(*numbers))
    with generators_kept():
        draw_from(*numbers)
        items = iter(sampler)
        drawn = _states()
    nothing = object()
    while True:
        with generators_kept():
            _set_states(drawn)
            item = next(items, nothing)
            drawn = _states()
        if item is nothing:
            return
        yield item


def _generators_of(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators of a sampler, and of one that it takes batches of."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_states(states: tuple[Any, ...]) -> None:
    own, python, of_numpy = states
    torch.default_generator.set_state(own)
    random.setstate(python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
