"""Sizes of microbatches: what the ranks of a stage have of each, by which programs differ."""

from __future__ import annotations

from typing import NamedTuple

from planner.language.graph.batch_split import BatchSplit

OWN_SIZES = "compiled sizes of the engine"
"""Under what name checkpoints have which sizes are compiled."""


class Size(NamedTuple):
    """What a rank has of a microbatch, and of which shape of batches."""

    bucket: int
    num_samples: int
    parts: tuple[int, ...] = ()
    """Samples of each replica, where ops run on the whole batch; else none."""


def places_of(
    split: BatchSplit, bucket: int, count: int, *, in_whole: bool = False
) -> set[tuple[int, Size]]:
    """Return the sizes that microbatches have in `count` parts, each with the number of its part.

    `in_whole`: of programs whose ops run on the whole batch.
    """
    parts = _in_parts(split.sizes[0], count) if in_whole else ()
    # (Of many microbatches few are unlike.)
    rows = {_in_parts(row, count) for row in set(split.sizes)}
    return {(number, Size(bucket, size, parts)) for row in rows for number, size in enumerate(row)}


def _in_parts(row: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return a microbatch's samples in parts, given those of its finest cut."""
    width = len(row) // count
    return tuple(sum(row[number * width : (number + 1) * width]) for number in range(count))
