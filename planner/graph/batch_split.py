"""Which samples of a global batch are in which microbatch, and in which part of it.

Microbatches are runs of the batch in order, and a microbatch is cut into runs, in order: one for
each place along the mesh axes that cut the batch. Bounds are rounded down, so sizes differ by
at most one, and the cut in D parts is a refinement of the cut in any divisor of D: stages that
cut the batch differently see the same microbatch.
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

    def part(self, index: int, parts: int, number: int) -> range:
        """Return one of the parts of a microbatch; IndexError as `microbatch`."""
        if not 0 <= number < parts:
            raise IndexError(f"part {number} is not one of 0..{parts - 1}")
        samples = self.microbatch(index)
        n = len(samples)
        return samples[n * number // parts : n * (number + 1) // parts]
