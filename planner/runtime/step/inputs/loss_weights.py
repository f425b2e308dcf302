"""What the mean loss of each part of a batch counts for in the mean loss of the whole.

A part counts by what the user counts in it (`planner.count_tokens`); else by the labels that its
loss is the mean over, where the graph says so (`label_counts`); else by its samples. Where every
rank is given the whole batch, no message is needed; where replicas have their own parts,
`agreement` sums what they count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from planner.errors import ModelError
from planner.graph.batch_split import BatchSplit
from planner.runtime.start.groups.mesh import Mesh
from planner.runtime.step.inputs.feed import CutBatch
from planner.runtime.step.inputs.label_counts import LabelCounts

LossWeight = Callable[[Any], float] | Literal["sum"]
"""What a part counts, by the user's function; "sum": every part once, as a loss that is a sum over
samples has it."""


class LossWeights:
    """Weighs one rank's microbatches. Mutable: weights by sample are kept by how a batch is cut.

    `count` is what the user says of a part; None: it counts by its labels, as `labels` counts them
    on each of the plan's shapes, or by its samples where no loss is a mean over labels. What the
    user says is compared with `labels`.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        has_loss: bool,
        count: LossWeight | None,
        labels: Sequence[LabelCounts | None] = (),
    ) -> None:
        self._mesh = mesh
        self._num_parts, self._number = mesh.size("batch"), mesh.rank("batch")
        self._device = mesh.device
        self._dtype, self._has_loss, self._count = dtype, has_loss, count
        known = [each for each in labels if each is not None]
        known = known if len(known) == len(labels) else []
        self._labels = known if count is None else []
        self._compared = known if callable(count) else []
        self._by_samples: dict[tuple[tuple[int, ...], int], tuple[Tensor, ...]] = {}

    @property
    def counts(self) -> bool:
        """Whether it looks into the rank's parts of the batch."""
        return self._has_loss and self._is_counted

    @property
    def _is_counted(self) -> bool:
        """Whether any rank's does."""
        return callable(self._count) or bool(self._labels)

    def reads(self, paths: Collection[str]) -> frozenset[str]:
        """Return which of the batch's tensors it looks into."""
        if not self.counts:
            return frozenset()
        return self._labels[0].reads if self._labels else frozenset(paths)

    def of(self, cut: CutBatch) -> tuple[Tensor, ...]:
        """Return the weight of each of this rank's microbatches; () where no loss is.

        `cut` is a whole batch. Raises ModelError where the user's counts can't be weights.
        """
        if not self.counts:
            return self.by_samples(cut.split)
        # All replicas' parts are counted here, so every rank finds the same total without a
        # message.
        counts = self._counts(cut)
        return self.by_counts(counts[self._number], sum(map(sum, counts)))

    @property
    def are_sums(self) -> bool:
        """Whether losses of parts are added."""
        return self._count == "sum"

    def total(self, cut: CutBatch) -> float:
        """Return what counts in a whole batch."""
        if not self._is_counted:
            return float(cut.split.num_samples * cut.unit.size)
        return sum(map(sum, self._counts(cut)))

    def _counts(self, cut: CutBatch) -> list[list[float]]:
        """Return what counts in each microbatch of each replica of a whole batch."""
        split, parts, each = cut.split, self._num_parts, cut.split.num_microbatches
        places = product(range(parts), range(each))
        found = self.count(cut, [split.part(m, parts, number) for number, m in places])
        return [found[number * each : (number + 1) * each] for number in range(parts)]

    def by_samples(self, split: BatchSplit) -> tuple[Tensor, ...]:
        """Return the weights where each sample counts the same, in a mean over all or in a sum;
        () where no loss is.
        """
        if not self._has_loss:
            return ()
        own = tuple(map(len, split.own(self._num_parts, self._number)))
        key = (own, split.num_samples)
        if key not in self._by_samples:
            is_sum = self._count == "sum"
            weights = (float(n > 0) if is_sum else n / split.num_samples for n in own)
            self._by_samples[key] = self._tensors(weights)
        return self._by_samples[key]

    def count(self, cut: CutBatch, runs: Sequence[range]) -> list[float]:
        """Return what counts in each of some runs of samples.

        Raises ModelError for what is less than zero, or no number.
        """
        if self._labels:
            warns = self._number == 0 and self._mesh.is_first_of_samples
            return self._labels[cut.bucket].count(cut, runs, warns=warns)
        assert callable(self._count)
        counts = [float(self._count(cut.part(samples))) for samples in runs]
        if not all(count >= 0 for count in counts):
            raise _no_weights(counts)
        if self._compared and self._number == 0 and self._mesh.is_first_of_samples:
            self._compared[cut.bucket].compare(counts, cut, runs)
        return counts

    def by_counts(self, own: Sequence[float], total: float) -> tuple[Tensor, ...]:
        """Return the weights of runs that count so much of a total.

        Raises ModelError where nothing counts.
        """
        if not total > 0 and self._labels:
            raise ModelError(
                "the batch has no label that is not ignored, so it has no mean loss; give batches "
                "with labels"
            )
        if not total > 0:
            raise _no_weights(own)
        return self._tensors(count / total for count in own)

    def _tensors(self, weights: Iterable[float]) -> tuple[Tensor, ...]:
        return torch.tensor(list(weights), dtype=self._dtype, device=self._device).unbind()


def _no_weights(counts: Sequence[float]) -> ModelError:
    return ModelError(
        f"loss_weight gave {list(counts)} for the microbatches of a replica; they must not be "
        "negative, nor all zero"
    )
