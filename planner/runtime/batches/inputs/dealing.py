"""Samples of a batch dealt to replicas and microbatches so that each gets about as much work.

    given     [ 9 8 | 1 1 ]  [ 1 1 | 2 1 ]      two replicas of two microbatches of two samples:
    dealt     [ 9 1 | 1 1 ]  [ 8 1 | 1 2 ]      work 19 and 5, then 12 and 12

Replicas wait for the fullest of them at the end of a step (under ZeRO 3 in each block), stages of a
pipeline for the fullest microbatch in every job. So samples are dealt to replicas first, then those
of each to its microbatches: the longest first, each where there is least so far and room for it
(Graham 1969), then pairs change places between the fullest part and the emptiest. Every part keeps
its number of samples. Free of torch, and the same wherever it is computed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from planner.language.graph.batch_split import BatchSplit

LEAST_GAIN = 0.01
"""By how much of the mean the fullest part must become emptier; for less the order stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How much more work the fullest part of a batch has than the mean, by its share: 1 is even.

    Attributes:
        replica: of all microbatches of the fullest replica.
        microbatch: of the fullest microbatch of any replica.
    """

    replica: float
    microbatch: float


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """How a batch was dealt.

    Attributes:
        order: by place in the split, which sample of the batch is there; None as they were given.
        given: the imbalance of samples in the order they were given.
        now: that of samples as they are dealt.
    """

    order: tuple[int, ...] | None
    given: Imbalance
    now: Imbalance

    @property
    def told(self) -> str:
        """What it has come to, in words."""
        return (
            f"documents dealt by work: fullest replica {self.now.replica:.2f} of the mean "
            f"({self.given.replica:.2f} as given), fullest microbatch {self.now.microbatch:.2f} "
            f"({self.given.microbatch:.2f})"
        )


def deal(work: Sequence[int], split: BatchSplit, shares: Sequence[int] = ()) -> Dealt:
    """Return how samples of so much work each are dealt to the parts of a split.

    `shares` are the parts' shares of the work, which they do in equal time (none: equal ones).
    """
    shares = shares or (1,) * len(split.sizes[0])
    given = imbalance(work, split, range(split.num_samples), shares)
    kept = Dealt(order=None, given=given, now=given)
    if max(given.replica, given.microbatch) <= 1 + LEAST_GAIN:
        return kept
    order = _dealt(work, split, shares)
    now = imbalance(work, split, order, shares)
    is_better = now.replica <= given.replica - LEAST_GAIN or (
        now.replica <= given.replica and now.microbatch <= given.microbatch - LEAST_GAIN
    )
    return Dealt(order=tuple(order), given=given, now=now) if is_better else kept


def imbalance(
    work: Sequence[int], split: BatchSplit, order: Sequence[int], shares: Sequence[int]
) -> Imbalance:
    """Return the imbalance of samples in an order."""
    replicas = [0] * len(shares)
    mean, fullest, start = sum(work) / sum(shares), 0.0, 0
    if not mean:
        return Imbalance(replica=1.0, microbatch=1.0)
    for sizes in split.sizes:
        for part, size in enumerate(sizes):
            own = sum(work[sample] for sample in order[start : start + size])
            replicas[part] += own
            fullest = max(fullest, own / shares[part])
            start += size
    most = max(own / share for own, share in zip(replicas, shares, strict=True))
    return Imbalance(replica=most / mean, microbatch=fullest * split.num_microbatches / mean)


def _dealt(work: Sequence[int], split: BatchSplit, shares: Sequence[int]) -> list[int]:
    by_part = list(zip(*split.sizes, strict=True))
    counts = [sum(sizes) for sizes in by_part]
    replicas = _shared_out(range(split.num_samples), work, counts, shares)
    dealt = []
    for samples, sizes in zip(replicas, by_part, strict=True):
        own = _shared_out(samples, work, sizes, (1,) * len(sizes))
        if len(set(sizes)) == 1:
            # Under ZeRO 3 replicas wait for each other's microbatch of one number.
            own.sort(key=lambda each: -sum(work[sample] for sample in each))
        dealt.append(own)
    return [
        sample for m in range(split.num_microbatches) for own in dealt for sample in sorted(own[m])
    ]


def _shared_out(
    samples: Sequence[int], work: Sequence[int], sizes: Sequence[int], shares: Sequence[int]
) -> list[list[int]]:
    """Return samples in bins of these sizes, which have shares of the work."""
    bins: list[list[int]] = [[] for _ in sizes]
    loads = [0] * len(sizes)
    emptiest = [(0.0, number) for number, size in enumerate(sizes) if size]
    for sample in sorted(samples, key=lambda each: (-work[each], each)):
        _, number = heapq.heappop(emptiest)
        bins[number].append(sample)
        loads[number] += work[sample]
        if len(bins[number]) < sizes[number]:
            heapq.heappush(emptiest, (loads[number] / shares[number], number))
    if len(set(shares)) == 1:
        _swap(bins, loads, work)
    return bins


def _swap(bins: list[list[int]], loads: list[int], work: Sequence[int]) -> None:
    """Let samples of the fullest bin and the emptiest change places while that brings them nearer.

    The last samples go where there is room, be it full already: swaps mend that.
    """
    numbers = range(len(bins))
    for _ in numbers:
        fullest, emptiest = max(numbers, key=loads.__getitem__), min(numbers, key=loads.__getitem__)
        gap = loads[fullest] - loads[emptiest]
        others = sorted((work[sample], at) for at, sample in enumerate(bins[emptiest]))
        best, left = None, gap
        for place, sample in enumerate(bins[fullest]):
            # A swap moves the difference: half the gap makes both alike.
            near = bisect_left(others, (work[sample] - gap / 2, -1))
            for other, at in others[max(0, near - 1) : near + 1]:
                after = abs(gap - 2 * (work[sample] - other))
                if after < left:
                    best, left = (place, at), after
        if best is None:
            return
        place, at = best
        heavy, light = bins[fullest][place], bins[emptiest][at]
        bins[fullest][place], bins[emptiest][at] = light, heavy
        loads[fullest] += work[light] - work[heavy]
        loads[emptiest] += work[heavy] - work[light]
