"""What the mean loss of each part of a batch counts for in the mean loss of the whole.

A part counts by its samples, or by what the user counts in it (`planner.count_tokens`). As
every rank is given the whole batch, no rank needs to ask another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner.errors import ModelError
from planner.runtime.start.mesh import Mesh
from planner.runtime.step.feed import CutBatch

LossWeight = Callable[[Any], float]


class LossWeights:
    """Weighs one rank's microbatches. Mutable: weights by sample are kept by batch size.

    `count` is the user's function from a part of the batch to how much of it counts.
    """

    def __init__(
        self, mesh: Mesh, *, dtype: torch.dtype, has_loss: bool, count: LossWeight | None
    ) -> None:
        self._num_parts, self._number = mesh.size("batch"), mesh.rank("batch")
        self._device = mesh.device
        self._dtype, self._has_loss, self._count = dtype, has_loss, count
        self._by_samples: dict[int, tuple[Tensor, ...]] = {}

    def of(self, cut: CutBatch) -> tuple[Tensor, ...]:
        """Return the weight of each of this rank's microbatches; () where no loss is."""
        if not self._has_loss:
            return ()
        if self._count is not None:
            return self._tensors(self._counted(cut, self._count))
        num_samples = cut.split.num_samples
        if num_samples not in self._by_samples:
            weights = [len(own) / num_samples for own in self._parts(cut, self._number)]
            self._by_samples[num_samples] = self._tensors(weights)
        return self._by_samples[num_samples]

    def _parts(self, cut: CutBatch, number: int) -> list[range]:
        count = cut.split.num_microbatches
        return [cut.split.part(index, self._num_parts, number) for index in range(count)]

    def total(self, cut: CutBatch) -> float:
        """Return what the whole batch counts: its samples, or what the user counts in it."""
        if self._count is None:
            return float(cut.split.num_samples)
        return sum(map(sum, self._counts(cut, self._count)))

    def _counted(self, cut: CutBatch, count: LossWeight) -> list[float]:
        counts = self._counts(cut, count)
        total = sum(map(sum, counts))
        return [own / total for own in counts[self._number]]

    def _counts(self, cut: CutBatch, count: LossWeight) -> list[list[float]]:
        counts = [
            [float(count(cut.part(samples))) for samples in self._parts(cut, number)]
            for number in range(self._num_parts)
        ]
        total = sum(map(sum, counts))
        if not total > 0 or min(map(min, counts)) < 0:
            raise ModelError(
                f"loss_weight gave {counts} for the parts of the batch on each replica; they must "
                "not be negative, nor all zero"
            )
        return counts

    def _tensors(self, weights: list[float]) -> tuple[Tensor, ...]:
        return torch.tensor(weights, dtype=self._dtype, device=self._device).unbind()
