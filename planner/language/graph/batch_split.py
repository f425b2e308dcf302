"""Which samples of a global batch are in which microbatch, and in which part of it.

Microbatches are runs of the batch in order, and a microbatch is cut into runs, in order: one for
each place along the mesh axes that cut the batch. Stages may cut it in different numbers of parts;
all cuts are coarser than the *finest*, so they see the same microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A batch in microbatches: ``sizes[m][p]`` samples are in part p of the finest cut of m."""

    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, num_samples: int, *, num_microbatches: int, parts: int = 1) -> BatchSplit:
        """Return a split of samples that lie together: sizes differ by at most one.

        Bounds are rounded down, so a cut in any divisor of `parts` is that of as many alone.
        """
        return cls.by_shares(num_samples, num_microbatches=num_microbatches, shares=(1,) * parts)

    @classmethod
    def by_shares(
        cls, num_samples: int, *, num_microbatches: int, shares: tuple[int, ...]
    ) -> BatchSplit:
        """Return a split of samples that lie together into microbatches that differ by at most one,
        of each of which part p has ``shares[p]`` of ``sum(shares)``, rounded by less than one.
        """
        bounds = list(accumulate(shares, initial=0))
        return cls(
            sizes=tuple(_between(size, bounds) for size in _even(num_samples, num_microbatches))
        )

    @classmethod
    def of_parts(cls, samples: tuple[int, ...], *, num_microbatches: int) -> BatchSplit:
        """Return the split of parts that lie apart, of which part p has ``samples[p]``."""
        return cls(sizes=tuple(zip(*(_even(n, num_microbatches) for n in samples), strict=True)))

    def resized(self, num_samples: int) -> BatchSplit:
        """Return a split of another number of samples, each microbatch by the shares that the first
        one of this has.
        """
        if num_samples == self.num_samples:
            return self
        return self.by_shares(
            num_samples, num_microbatches=self.num_microbatches, shares=self.sizes[0]
        )

    @cached_property
    def num_samples(self) -> int:
        """Samples of the whole batch."""
        return sum(map(sum, self.sizes))

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the batch."""
        return len(self.sizes)

    def microbatch(self, index: int) -> range:
        """Return the samples of a microbatch. Raises IndexError for one there is not."""
        if not 0 <= index < self.num_microbatches:
            raise IndexError(f"microbatch {index} is not one of 0..{self.num_microbatches - 1}")
        return range(self._starts[index], self._starts[index + 1])

    def part(self, index: int, parts: int, number: int) -> range:
        """Return one of `parts` parts of a microbatch; IndexError as `microbatch`.

        `parts` divides those of the finest cut.
        """
        start = self.microbatch(index).start
        if not 0 <= number < parts:
            raise IndexError(f"part {number} is not one of 0..{parts - 1}")
        first, last = part_bounds(self.sizes[index], parts, number)
        return range(start + first, start + last)

    def own(self, parts: int, number: int) -> tuple[range, ...]:
        """Return the parts of one place of all microbatches, as they lie where it alone is read:
        one behind the other.
        """
        sizes = [len(self.part(m, parts, number)) for m in range(self.num_microbatches)]
        return _runs(sizes)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(map(sum, self.sizes), initial=0))


def part_bounds(sizes: tuple[int, ...], parts: int, number: int) -> tuple[int, int]:
    """Return where one of `parts` parts of a microbatch begins and ends.

    `sizes` are those of its finest cut.
    """
    width = len(sizes) // parts
    first = sum(sizes[: number * width])
    return first, first + sum(sizes[number * width : (number + 1) * width])


def _even(num_samples: int, count: int) -> tuple[int, ...]:
    return _between(num_samples, range(count + 1))


def _between(num_samples: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the samples between bounds, of which the last is where the samples end."""
    scaled = [num_samples * bound // bounds[-1] for bound in bounds]
    return tuple(b - a for a, b in pairwise(scaled))


def _runs(sizes: list[int]) -> tuple[range, ...]:
    ends = list(accumulate(sizes, initial=0))
    return tuple(range(a, b) for a, b in pairwise(ends))
