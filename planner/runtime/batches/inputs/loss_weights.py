"""What the loss of each part of a batch counts for in the loss of the whole.

The graph says so (`planner.language.across.whole`): a part of a mean counts by its samples, or by
its labels that are not ignored; a part of a sum counts once. Only of a loss of which it does not
(its divisor is of the model's own making), the user's function counts a part. Where every rank is
given the whole batch, no message is needed; where replicas have their own parts, `agreement` tells
all ranks what counts in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import isclose
from typing import Any, Literal

import torch
from torch import Tensor

from planner.errors import ModelError, PlanError
from planner.language.graph.batch_split import BatchSplit
from planner.language.ops.samples.state import ADDED, SAMPLES, SCALED
from planner.runtime.batches.inputs.feed import CutBatch
from planner.runtime.batches.inputs.whole_batch import (
    Counted,
    OfPart,
    OfWhole,
    WholeBatchValues,
    is_known,
)
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.to_device import to_device

LossWeight = Callable[[Any], float] | Literal["sum"]
"""What a part counts, by the user's function; "sum": every part once, as a loss that is a sum over
samples has it."""


class LossWeights:
    """Weighs one rank's microbatches. Mutable: what the user counts is compared once, and weights
    that follow from sizes are kept.

    `count` is what the user says of a part. `wholes` make what parts take of the whole batch, and
    count for, on each of the plan's shapes. With `is_exact` the loss of the batch follows from
    those of the parts as the graph says, and the user's function must say the same.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        has_loss: bool,
        takes: bool,
        count: LossWeight | None,
        wholes: Sequence[WholeBatchValues],
        is_exact: bool,
    ) -> None:
        """`takes`: whether a stage of the rank takes values of the whole batch.

        Raises PlanError for parts that are to be summed, of a loss that is a mean.
        """
        self._mesh = mesh
        self._num_parts, self._number = mesh.size("batch"), mesh.rank("batch")
        self._device, self._dtype, self._has_loss = mesh.device, dtype, has_loss
        self._takes, self._wholes = takes, wholes
        share = wholes[0].shares.share
        self._kept: dict[tuple[int, ...] | None, tuple[Tensor, ...]] = {}
        self._is_sum = count == "sum" and not is_exact
        if count == "sum" and is_exact and share not in (ADDED, SCALED):
            counted = "samples" if share == SAMPLES else "labels that are not ignored"
            raise PlanError(
                f'loss_weight="sum" was given, and the loss is a mean over {counted}, whose parts '
                "do not add up; leave loss_weight out, and parts count as they do in one process"
            )
        # By the user's function alone, or to be compared with what the graph says.
        self._count = count if callable(count) and not is_exact else None
        self._compared = count if callable(count) and is_exact else None

    @property
    def is_needed(self) -> bool:
        """Whether something is made of the batch's tensors, for any rank."""
        return self._count is not None or self._wholes[0].is_needed

    @property
    def tells(self) -> bool:
        """Whether the rank tells others what counts in its own part."""
        return self._has_loss and self.is_needed and self._mesh.is_first_of_samples

    def reads(self, paths: Collection[str]) -> frozenset[str]:
        """Return which of the batch's tensors it looks into."""
        if not (self._has_loss or self._takes):
            return frozenset()
        if self._has_loss and (self._count is not None or self._compared is not None):
            return frozenset(paths)
        return frozenset().union(*(each.reads for each in self._wholes))

    def names(self, bucket: int) -> frozenset[str]:
        """Return the names in the graph of what blocks take of the whole batch."""
        return self._wholes[bucket].names

    def of_whole(self, cut: CutBatch) -> OfWhole:
        """Return what is made of a whole batch, on every rank alike.

        Raises ModelError where the user's counts are not what the loss counts.
        """
        if self._compared is not None:
            self._compare(cut, self._all_parts(cut.split), is_part=False)
        whole = self._wholes[cut.bucket]
        if not (whole.is_needed and (self._has_loss or self._takes)):
            return OfWhole(samples=cut.split.num_samples)
        return whole.of_whole(cut)

    def of_part(self, cut: CutBatch, runs: Sequence[range]) -> OfPart | None:
        """Return what others need of the rank's own part; None: nothing."""
        if self._compared is not None:
            self._compare(cut, runs, is_part=True)
        whole = self._wholes[cut.bucket]
        return whole.of_part(cut, runs) if whole.is_needed else None

    def joined(self, bucket: int, samples: int, parts: Sequence[OfPart]) -> OfWhole:
        """Return what is made of a batch of which replicas have parts."""
        return self._wholes[bucket].joined(parts) if parts else OfWhole(samples=samples)

    def in_order(self, whole: OfWhole, bucket: int, order: Sequence[int]) -> OfWhole:
        """Return what is made of a batch whose samples change places (`WholeBatchValues`)."""
        return self._wholes[bucket].in_order(whole, order)

    def parts(
        self, cut: CutBatch, runs: Sequence[range], whole: OfWhole, places: Sequence[range]
    ) -> list[Counted]:
        """Return what counts in each of this rank's microbatches, for what follows. Their samples
        have `places` in the whole batch.
        """
        if not (self._has_loss or self._takes):
            return [Counted(samples=len(run), counts={}) for run in runs]
        return self._wholes[cut.bucket].parts(cut, runs, whole, places)

    def given(self, whole: OfWhole, bucket: int, part: Counted, place: range) -> dict[str, Tensor]:
        """Return what blocks take with a microbatch, by names in the graph (see
        `WholeBatchValues.given`).
        """
        return self._wholes[bucket].given(whole, part, place) if self._takes else {}

    def of(
        self,
        whole: OfWhole,
        cut: CutBatch,
        runs: Sequence[range],
        parts: Sequence[Counted],
        counted: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the weight of each of this rank's microbatches; () where no loss is.

        `counted` is what the user counts in the whole batch, where replicas have their own parts.
        Raises ModelError where nothing counts, or the user's counts can't be weights.
        """
        if not self._has_loss:
            return ()
        if self._is_sum:
            return self._tensors(float(len(run) > 0) for run in runs)
        if self._count is not None:
            if counted is None:
                # All replicas' parts are counted here, so every rank finds the same total without
                # a message.
                every, each = self.counted(cut), cut.split.num_microbatches
                own, total = every[self._number * each :][:each], sum(every)
            else:
                own, total = self.count(cut, runs), counted
            if not total > 0:
                raise _no_weights(own)
            return self._tensors(each / total for each in own)
        made = self._wholes[cut.bucket]
        share = made.shares.share
        counts_labels = share not in (ADDED, SAMPLES, SCALED)
        if counts_labels and is_known(whole) and not whole.count(made.shares.counts[share]) > 0:
            raise ModelError(
                "the batch has no label that is not ignored, so it has no mean loss; give batches "
                "with labels"
            )
        # What follows from sizes alone is kept on the device: no step copies it there again.
        key = None if counts_labels else (*map(len, runs), whole.samples)
        if key not in self._kept or key is None:
            weights = torch.stack(made.weights(whole, parts))
            self._kept[key] = to_device(weights, self._device, self._dtype).unbind()
        return self._kept[key]

    def totals(self, whole: OfWhole, cut: CutBatch, counted: float | None) -> dict[str, float]:
        """Return what counts in a whole batch by the terms of its loss; {}: losses add up."""
        if self._is_sum:
            return {}
        if self._count is not None:
            return {"loss_weight": sum(self.counted(cut)) if counted is None else counted}
        made = self._wholes[cut.bucket]
        if made.shares.share == ADDED:
            return {}
        if made.is_needed and not whole.values:  # (a rank without use for them)
            whole = made.of_whole(cut)
        return made.totals(whole)

    def count(self, cut: CutBatch, runs: Sequence[range]) -> list[float]:
        """Return what the user counts in each of some runs of samples.

        Raises ModelError for what is less than zero, or no number.
        """
        count = self._count or self._compared
        assert count is not None
        counts = [float(count(cut.part(run))) for run in runs]
        if not all(each >= 0 for each in counts):
            raise _no_weights(counts)
        return counts

    @property
    def is_counted(self) -> bool:
        """Whether the user's function counts parts."""
        return self._count is not None

    def counted(self, cut: CutBatch) -> list[float]:
        """Return what the user counts in all parts of a whole batch."""
        return self.count(cut, self._all_parts(cut.split))

    def _all_parts(self, split: BatchSplit) -> list[range]:
        """Return the microbatches of all replicas, replica by replica."""
        return [
            split.part(m, self._num_parts, number)
            for number in range(self._num_parts)
            for m in range(split.num_microbatches)
        ]

    def _compare(self, cut: CutBatch, runs: Sequence[range], *, is_part: bool) -> None:
        """Raise ModelError, for the first batch, where the user's counts of some runs are those of
        no term of the loss; parts count as the loss says in any case.
        """
        made = self._wholes[cut.bucket]
        counts = self.count(cut, runs)
        self._compared = None
        if not sum(counts) > 0:
            raise _no_weights(counts)
        if is_part and made.counts_take_values:
            return
        found = made.counts_of(cut, runs)
        share = made.shares.share
        terms = [
            [each[made.shares.counts.get(term, term)] for each in found]
            for term in (made.shares.terms if share == SCALED else (share,))
            if term != ADDED
        ]
        if any(_in_proportion(counts, term) for term in terms):
            return
        own = f"is divided by {_told(terms[0])}" if terms else "is a sum over samples, all that is"
        raise ModelError(
            f"loss_weight counts {_told(counts)} in parts of the batch, and the loss {own} there; "
            "leave loss_weight out, and parts count as they do in one process, or `accept` "
            "local-samples to count them so"
        )

    def _tensors(self, weights: Iterable[float]) -> tuple[Tensor, ...]:
        return to_device(torch.tensor(list(weights), dtype=self._dtype), self._device).unbind()


def own_runs(split: BatchSplit, mesh: Mesh) -> tuple[range, ...]:
    """Return the places in a whole batch of a rank's microbatches."""
    count, number = mesh.size("batch"), mesh.rank("batch")
    return tuple(split.part(m, count, number) for m in range(split.num_microbatches))


def _in_proportion(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two counts are the same shares of their sums, but for rounding."""
    all_first, all_second = sum(first), sum(second)
    return all(
        isclose(a * all_second, b * all_first, rel_tol=1e-9, abs_tol=1e-12)
        for a, b in zip(first, second, strict=True)
    )


def _told(counts: Sequence[float]) -> list[float]:
    return [float(f"{count:.6g}") for count in counts]


def _no_weights(counts: Sequence[float]) -> ModelError:
    return ModelError(
        f"loss_weight gave {list(counts)} for the microbatches of a replica; they must not be "
        "negative, nor all zero"
    )
