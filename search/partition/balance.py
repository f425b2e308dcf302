"""Stages as equal as whole blocks allow: the cut used where virtual stages share ranks.

Two steps. The longest stage of the best partition of the chain into S runs is found by
bisection on its length, each probe a greedy walk that also tells which lengths make no
difference (Pinar & Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004).
Then every stage takes the blocks that bring it nearest to an equal share of what is left, never
more than that longest length and never so few that the rest could not be cut within it.

Complexity: O(S log n) a probe, a few probes where blocks are equal, then O(n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np


def balanced_cut(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return cuts 0 = k_0 < ... < k_S = n with the smallest longest stage, else even.

    Raises ValueError when there are fewer blocks than stages.
    """
    n = len(seconds)
    if num_stages > n:
        raise ValueError(f"{n} blocks cannot make {num_stages} stages")
    sums = [0.0, *accumulate(seconds)]
    longest = longest_stage(sums, num_stages)
    # Where a stage of at most `longest` seconds that starts at each block ends at the latest.
    furthest = (np.searchsorted(sums, np.add(sums, longest), side="right") - 1).tolist()
    needed = _stages_needed(furthest)
    cuts = [0]
    for stages_left in range(num_stages, 1, -1):
        first = cuts[-1]
        most = max(first + 1, min(furthest[first], n - stages_left + 1))
        # Where the stage would end if what is left were dealt evenly: the nearer block boundary.
        share = sums[first] + (sums[n] - sums[first]) / stages_left
        end = min(most, max(first + 1, bisect_right(sums, share) - 1))
        if end < most and sums[end + 1] - share < share - sums[end]:
            end += 1
        # Not so few blocks that the stages after could not hold the rest.
        while end < most and needed[end] > stages_left - 1:
            end += 1
        cuts.append(end)
    return (*cuts, n)


def longest_stage(sums: Sequence[float], num_stages: int) -> float:
    """Return the length of the longest run in the best partition, a hair above it at most.

    `sums` are running sums with a leading zero.
    """
    n = len(sums) - 1
    high = sums[n]
    # Some run has its share at least, and a block is not divided.
    low = max(high / num_stages, max(b - a for a, b in pairwise(sums)))
    while high - low > 1e-9 * high:
        # Nothing shorter than `low` does: where blocks are alike it often is the answer.
        fits, length = _probe(sums, num_stages, low)
        if fits:
            return low * (1 + 1e-12)
        # No length in between takes any run a block further: the answer is at least this.
        low = length
        fits, length = _probe(sums, num_stages, (low + high) / 2)
        if fits:
            # Runs that a probe found are a partition: the answer is at most its longest run.
            high = min(high, length)
        else:
            # This much is too short, and so is all up to the next length that takes a run further.
            low = max((low + high) / 2, length)
    return max(low, high) * (1 + 1e-12)


def _probe(sums: Sequence[float], num_stages: int, longest: float) -> tuple[bool, float]:
    """Return whether runs of at most `longest` cover the chain in num_stages or fewer, and how
    long the longest of them is; where they do not, the least that takes any of them further.
    """
    n, at = len(sums) - 1, 0
    reached, further = 0.0, float("inf")
    for _ in range(num_stages):
        end = bisect_right(sums, sums[at] + longest * (1 + 1e-12)) - 1
        if end >= n:
            return True, max(reached, sums[n] - sums[at])
        # One block is longer than the limit: nothing shorter than the block can do.
        if end == at:
            return False, sums[at + 1] - sums[at]
        reached = max(reached, sums[end] - sums[at])
        further = min(further, sums[end + 1] - sums[at])
        at = end
    return False, further


def _stages_needed(furthest: Sequence[int]) -> list[int]:
    """Return for each block how few runs cover it and all after it, `furthest` being where one
    that starts at each block ends at the latest.
    """
    needed = [0] * len(furthest)
    for first in range(len(furthest) - 2, -1, -1):
        needed[first] = 1 + needed[max(first + 1, furthest[first])]
    return needed
