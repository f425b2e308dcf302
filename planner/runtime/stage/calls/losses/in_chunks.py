"""Cross entropy of a product's results, of which only a chunk of rows exists at a time.

    forward    for each chunk of rows   logits = x w; keep their largest, the sum of exponentials
                                        and the target's
               for all rows             reduce these over the ranks, which makes the losses
    backward   for each chunk of rows   logits again; s = g (softmax - one-hot);
                                        dx = s w of these rows; dw += s' x

With a vocabulary that ranks divide, the two messages of a loss of whole logits are those of all
chunks together: each rank reduces its own entries alone, shifted by their own largest. Of each row
the logarithm of the sum of exponentials is saved, so that the backward needs none.

Weight gradients are made at once, also where a W job makes those of other products: it would have
to make the logits, or their gradient, once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.language.ops.families.losses.targets import MEAN, NONE
from planner.language.ops.kernel import LARGE_BYTES
from planner.runtime.process import collectives
from planner.runtime.stage.calls.local_ops import reduce_over
from planner.runtime.stage.calls.losses import chunk_loops
from planner.runtime.stage.calls.losses.chunk_loops import Chunks, Steps, dtype_behind
from planner.runtime.stage.calls.rows.beyond import A_LABEL, beyond


class _How(NamedTuple):
    """What a loss is given beside tensors; as in `LossInChunks`."""

    transposed: bool
    steps: Steps
    ignore_index: int
    smoothing: float
    rows: int
    group: str
    adds: bool
    """Whether the backward adds the weight's gradient to its sum itself."""

    def chunks(self, weight: Tensor) -> Chunks:
        """Return what the loops over chunks are told."""
        num_local = weight.shape[0 if self.transposed else 1]
        return Chunks(
            transposed=self.transposed,
            steps=self.steps,
            ignore_index=self.ignore_index,
            smoothing=self.smoothing,
            rows=self.rows,
            first=collectives.rank(self.group) * num_local,
            num_classes=num_local * collectives.size(self.group),
        )


def cross_entropy_in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    transposed: bool,
    steps: Steps,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    rows: int,
    group: str = "",
    adds: bool = False,
) -> Tensor:
    """Cross entropy of the product of `x` [..., hidden] and a weight, `rows` rows at a time.

    `weight` is [vocabulary / ranks, hidden], or its transpose where not `transposed`; `target` has
    an index over the whole vocabulary for each row of x, `reduction` is ATen's number. `steps` are
    ops on the logits ahead of the loss, as in `LossInChunks`.
    """
    how = _How(transposed, steps, ignore_index, label_smoothing, rows, group, adds)
    losses = _InChunks.apply(x, weight, bias, target, how)
    if reduction == NONE:
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == MEAN else total


class _InChunks(torch.autograd.Function):
    """Losses by row, zero where ignored."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: _How
    ) -> Tensor:
        rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        given, chunks = dtype_behind(x.dtype, how.steps), how.chunks(weight)
        found = chunk_loops.numbers(rows, weight, bias, labels, chunks)
        largest, sums = found[0], found[1:]
        if how.group:
            # Sums were of logits less this rank's largest; of all ranks they are less that of all.
            largest = reduce_over(found[0], how.group, "max")
            shift = found[0] - largest
            sums[0].mul_(shift.exp())
            sums[2].add_(shift, alpha=chunks.num_classes // collectives.size(how.group))
            sums = reduce_over(sums, how.group, "sum")
        log_sum = sums[0].log()
        # (1 - e) (-log p[target]) + e / C sum over c of (-log p[c]), with log p[c] = logit[c] -
        # largest - log of the sum.
        losses = log_sum - (1 - how.smoothing) * (sums[1] - largest)
        if how.smoothing:
            losses.sub_(sums[2], alpha=how.smoothing / chunks.num_classes)
        is_beyond = beyond(labels, chunks.num_classes, what=A_LABEL, ignored=how.ignore_index)
        losses.masked_fill_(is_beyond, torch.nan)
        ctx.save_for_backward(x, weight, bias, target, log_sum.add_(largest))
        # (In a graph a sum of gradients is outside.)
        adds = how.adds and not torch.compiler.is_compiling()
        adds = adds and weight.is_leaf and weight.nbytes >= LARGE_BYTES
        # As an attribute: what is saved may come back detached from where its gradient is.
        ctx.holder = weight if adds else None
        ctx.ignore_index, ctx.chunks = how.ignore_index, chunks
        return losses.masked_fill_(labels == how.ignore_index, 0).to(given).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, target, normalizer = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        scale = grad.reshape(-1).to(normalizer.dtype).masked_fill(labels == ctx.ignore_index, 0)
        dx, dw, db = chunk_loops.gradients(
            rows,
            weight,
            bias,
            labels,
            normalizer,
            scale,
            ctx.chunks,
            (needs_x, needs_weight, needs_bias),
            total=None if ctx.holder is None else ctx.holder.grad,
        )
        return None if dx is None else dx.view(x.shape), dw, db, None, None
