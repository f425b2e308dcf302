"""Which pp rank holds each stage: loop and fold, written into a Schedule as data.

With pp=4, vpp=2 (stages 0..7):

    loop   rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
    fold   rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4     (the V of ZB-V)

A loop sends from the last rank back to the first between chunks; a fold turns round, so the
chunks meet on one rank and nothing is sent there, and the first and last stage share a rank.
"""

from __future__ import annotations

from collections.abc import Callable

StagePlacement = Callable[[int, int], tuple[int, ...]]
"""From (pp, vpp) to the pp rank of each of the pp * vpp stages."""


def loop_placement(pp: int, vpp: int) -> tuple[int, ...]:
    """Deal stages round-robin, as Megatron does (arXiv 2104.04473, section 2.2)."""
    return tuple(range(pp)) * vpp


def fold_placement(pp: int, vpp: int) -> tuple[int, ...]:
    """Run every second chunk back through the ranks in reverse; with vpp=2 this is the V."""
    there, back = tuple(range(pp)), tuple(reversed(range(pp)))
    return tuple(rank for chunk in range(vpp) for rank in (back if chunk % 2 else there))
