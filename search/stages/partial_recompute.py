"""Recomputing a part of a stage more: how many of its first blocks, and what that takes.

All blocks of a run take `light`, and of its first blocks, up to a block x, those that `heavy` frees
bytes of take `heavy`. With running sums along the chain

    K  bytes that blocks save under light     D  bytes that heavy frees of them, never negative
    R  seconds of light recomputation         E  seconds that heavy adds where it frees bytes

a run i .. j-1 saves K[j] - K[i] - (D[x] - D[i]) and takes R[j] - R[i] + E[x] - E[i] more than
without recomputation. Both are monotone in x, so the fastest x that fits is the least one, found
by bisection in D: no search over x. It never falls with j nor rises with i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from costmodel.time.stage_costs.chain import ChainCosts
from costmodel.time.stage_costs.runs import Flags, Floats, Indices
from planner.language.plan import Recompute

_SLACK = 1e-9
"""Relative: bytes are summed in another order than bounds of whole runs sum them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialRecompute:
    """What the blocks of a chain recompute where the first ones of a run recompute more."""

    light: tuple[Recompute, ...]
    """(n) What every block recomputes."""
    heavy: tuple[Recompute, ...]
    """(n) What it recomputes among the first; as `light` where that frees nothing."""
    kept: Floats
    """(n + 1) K, outputs that the next block saves too counted there."""
    shared: Floats
    """(n) Bytes of those outputs: a run's last block keeps them itself."""
    freed: Floats
    """(n + 1) D."""
    light_s: Floats
    """(n + 1) R."""
    more_s: Floats
    """(n + 1) E."""
    heavy_s: Floats
    """(n + 1) R under the heavy choice of every block."""

    def until(self, start: Indices, end: Indices, most_bytes: Floats) -> Indices:
        """Return x for runs of which a microbatch may keep so many bytes: at least one block
        recomputes more. More than `end` where that does not suffice.
        """
        kept = self.kept[end] - self.kept[start] + self.shared[end - 1]
        needed = kept - most_bytes - _SLACK * kept
        # D at x has to be as much above D at the start as the run is over its bytes.
        least = self.freed[start] + np.maximum(needed, 0.0)
        # The first x that frees anything: below it, nothing more than light is recomputed.
        first = np.searchsorted(self.freed, self.freed[start], side="right")
        until = np.maximum(np.searchsorted(self.freed, least, side="left"), first)
        # The last block also frees what the next one would have shared with it.
        is_heavy = self.freed[end] > self.freed[end - 1]
        freed = self.freed[end] - self.freed[start] + self.shared[end - 1] * is_heavy
        fits: Flags = (first <= end) & (freed >= needed)
        return np.where(fits, np.minimum(until, end), end + 1)

    def again_s(self, start: Indices, end: Indices, until: Indices) -> Floats:
        """Return what recomputation adds to the backward of runs, given x."""
        until = np.minimum(until, end)
        again = self.light_s[end] - self.light_s[start]
        seconds: Floats = again + self.more_s[until] - self.more_s[start]
        return seconds

    def least_again_s(self, start: Any, end: Any, most_bytes: Floats) -> Floats:
        """Return the same of runs that keep at least K[j] - K[i] and may keep so many bytes;
        infinite where they may not. A lower bound: neither tells what the ends of a run share.
        """
        needed = self.kept[end] - self.kept[start] - most_bytes
        needed = needed - _SLACK * self.kept[-1]
        # As in `until`, but x may be the start itself, where light recomputation suffices.
        until = np.searchsorted(self.freed, self.freed[start] + np.maximum(needed, 0.0))
        fits: Flags = needed <= self.freed[end] - self.freed[start]
        return np.where(fits, self.again_s(start, end, until), np.inf)

    def by_block(self, start: int, end: int, until: int) -> tuple[Recompute, ...]:
        """Return what each block of a run recomputes, given x."""
        return (*self.heavy[start:until], *self.light[until:end])

    def steps(self, start: int, end: int, until: int) -> list[int]:
        """Return each larger x of a run that frees more."""
        return [x for x in range(until + 1, end + 1) if self.freed[x] > self.freed[x - 1]]


def partial_recomputes(
    chain: ChainCosts, choices: Sequence[Recompute]
) -> tuple[PartialRecompute, ...]:
    """Return the pairs of these choices, the lightest of which comes first.

    A heavier choice counts where it frees bytes of the lighter one; elsewhere that is kept.
    """
    levels: list[tuple[Recompute, ...]] = []
    for choice in choices:
        given: tuple[Recompute, ...] = (choice,) * chain.num_blocks
        # Each level is taken against the one before it: a block that a heavier choice frees nothing
        # of stays lighter.
        levels.append(_where_it_frees(chain, levels[-1], given)[0] if levels else given)
    return tuple(_pair(chain, light, heavy) for light, heavy in combinations(levels, 2))


def _pair(
    chain: ChainCosts, light: tuple[Recompute, ...], heavy: tuple[Recompute, ...]
) -> PartialRecompute:
    heavy, freed = _where_it_frees(chain, light, heavy)
    kept, shared = chain.loads.kept_along(light)
    light_s, heavy_s = (chain.times.recompute_s(choices) for choices in (light, heavy))
    return PartialRecompute(
        light=light,
        heavy=heavy,
        kept=kept,
        shared=shared,
        freed=_sums(freed),
        light_s=_sums(light_s),
        # Clipped, so that E never falls and the least x that fits stays the fastest.
        more_s=_sums(np.maximum(0.0, heavy_s - light_s)),
        heavy_s=_sums(heavy_s),
    )


def _where_it_frees(
    chain: ChainCosts, light: tuple[Recompute, ...], heavy: tuple[Recompute, ...]
) -> tuple[tuple[Recompute, ...], Floats]:
    """Return what blocks recompute of a heavier choice, and how many bytes (n) that frees."""
    kept = np.diff(chain.loads.kept_along(light)[0])
    # Recomputed blocks share nothing that they save.
    freed = np.maximum(0.0, kept - np.diff(chain.loads.kept_along(heavy)[0]))
    is_freed = (freed > 0).tolist()
    chosen = tuple(h if frees else a for a, h, frees in zip(light, heavy, is_freed, strict=True))
    return chosen, freed


def _sums(of_blocks: Floats) -> Floats:
    return np.append(0.0, np.cumsum(of_blocks))
