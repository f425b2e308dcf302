"""Parts of a tensor as boxes, and who sends what where boxes lie on other ranks; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) of each dim."""


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None."""
    found = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def box_numel(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(sizes(box))


def sizes(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box, held: Box) -> tuple[slice, ...]:
    """Return where a box lies inside another one that holds it."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, held, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A part of the tensor sent from one rank to another (or kept, when they are the same)."""

    src_rank: int
    dst_rank: int
    box: Box


def box_transfers(src: Mapping[int, Box], dst: Mapping[int, Box]) -> Iterator[Transfer]:
    """Yield what each target rank receives: every element once, from a rank that has it.

    `src` and `dst` give each rank's part. Of several ranks that hold the same part the
    receiver itself comes first, then they take turns, so that no one replica serves
    everybody.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in src.items():
        holders.setdefault(box, []).append(rank)
    # Boxes of a layout are equal or disjoint, so parts from different boxes have no element in
    # common.
    turns = dict.fromkeys(holders, 0)
    for rank, needed in dst.items():
        for held, ranks in holders.items():
            part = intersection(held, needed)
            if part is None:
                continue
            if src.get(rank) == held:
                yield Transfer(src_rank=rank, dst_rank=rank, box=part)
                continue
            sender = ranks[turns[held] % len(ranks)]
            turns[held] += 1
            yield Transfer(src_rank=sender, dst_rank=rank, box=part)
