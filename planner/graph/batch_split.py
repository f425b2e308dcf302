"""Which samples of a global batch are in which microbatch, and on which dp rank.

Microbatches are runs of the batch in order, and a microbatch is cut into runs over the dp
ranks of a stage, in order. Bounds are rounded down, so sizes differ by at most one, and
the cut over D ranks is a refinement of the cut over any divisor of D: stages with
different dp degrees see the same microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """A batch of `num_samples` in `num_microbatches`."""

    num_samples: int
    num_microbatches: int

    def microbatch(self, index: int) -> range:
        """Return the samples of a microbatch. Raises IndexError for one there is not."""
        if not 0 <= index < self.num_microbatches:
            raise IndexError(f"microbatch {index} is not one of 0..{self.num_microbatches - 1}")
        n, count = self.num_samples, self.num_microbatches
        return range(n * index // count, n * (index + 1) // count)

    def part(self, index: int, dp: int, dp_rank: int) -> range:
        """Return a microbatch's samples on one of `dp` ranks; IndexError as `microbatch`."""
        if not 0 <= dp_rank < dp:
            raise IndexError(f"dp rank {dp_rank} is not one of 0..{dp - 1}")
        samples = self.microbatch(index)
        n = len(samples)
        return samples[n * dp_rank // dp : n * (dp_rank + 1) // dp]
