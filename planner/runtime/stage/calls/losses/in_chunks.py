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

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.language.ops.families.losses.in_chunks import CAST
from planner.language.ops.families.losses.targets import MEAN, NONE
from planner.language.ops.kernel import LARGE_BYTES
from planner.runtime.process import collectives
from planner.runtime.stage.calls.local_ops import reduce_over
from planner.runtime.stage.calls.rows.beyond import A_LABEL, beyond

Steps = Sequence[Sequence[Any]]
"""Ops on logits: of each its target, and its arguments behind them."""


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
        given = _dtype(x.dtype, how)
        wide = torch.promote_types(given, torch.float32)
        num_local = weight.shape[0 if how.transposed else 1]
        num_classes = num_local * collectives.size(how.group)
        # By row: the largest logit, the sum of exponentials, the target's logit (0 on ranks that
        # lack it), the sum of logits (for the smoothing); all but the target's less the largest.
        numbers = rows.new_zeros((4, len(rows)), dtype=wide)
        for start in range(0, len(rows), how.rows):
            chunk = slice(start, start + how.rows)
            logits = _stepped(_product(rows[chunk], weight, bias, how), how).to(wide)
            local, is_here = _local(labels[chunk], num_local, how)
            at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            numbers[2, chunk] = at_target.masked_fill_(~is_here, 0)
            torch.amax(logits, -1, out=numbers[0, chunk])
            logits.sub_(numbers[0, chunk].unsqueeze(-1))
            if how.smoothing:
                torch.sum(logits, -1, out=numbers[3, chunk])
            torch.sum(logits.exp_(), -1, out=numbers[1, chunk])
            del logits
        largest, sums = numbers[0], numbers[1:]
        if how.group:
            # Sums were of logits less this rank's largest; of all ranks they are less that of all.
            largest = reduce_over(numbers[0], how.group, "max")
            shift = numbers[0] - largest
            sums[0].mul_(shift.exp())
            sums[2].add_(shift, alpha=num_local)
            sums = reduce_over(sums, how.group, "sum")
        log_sum = sums[0].log()
        # (1 - e) (-log p[target]) + e / C sum over c of (-log p[c]), with log p[c] = logit[c] -
        # largest - log of the sum.
        losses = log_sum - (1 - how.smoothing) * (sums[1] - largest)
        if how.smoothing:
            losses.sub_(sums[2], alpha=how.smoothing / num_classes)
        is_beyond = beyond(labels, num_classes, what=A_LABEL, ignored=how.ignore_index)
        losses.masked_fill_(is_beyond, torch.nan)
        ctx.save_for_backward(x, weight, bias, target, log_sum.add_(largest))
        adds = how.adds and weight.is_leaf and weight.nbytes >= LARGE_BYTES
        # As an attribute: what is saved may come back detached from where its gradient is.
        ctx.holder = weight if adds else None
        ctx.how, ctx.num_classes = how, num_classes
        return losses.masked_fill_(labels == how.ignore_index, 0).to(given).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, target, normalizer = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        how = ctx.how
        rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        num_local = weight.shape[0 if how.transposed else 1]
        wide = normalizer.dtype
        scale = grad.reshape(-1).to(wide).masked_fill(labels == how.ignore_index, 0)
        dx = torch.empty_like(rows) if needs_x else None
        of_weight = _Sum(ctx.holder) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        by_output = weight if how.transposed else weight.t()
        only_casts = all(target == CAST for target, *_ in how.steps)
        for start in range(0, len(rows), how.rows):
            chunk = slice(start, start + how.rows)
            made = _product(rows[chunk], weight, bias, how)
            if only_casts:
                slopes, behind = _stepped(made, how).to(wide), None
                del made
            else:
                # Of other steps autograd has the gradients.
                with torch.enable_grad():
                    behind = _stepped(made.requires_grad_(), how)
                slopes = behind.detach().to(wide, copy=True)
            slopes.sub_(normalizer[chunk].unsqueeze(-1)).exp_()
            if how.smoothing:
                slopes.sub_(how.smoothing / ctx.num_classes)
            local, is_here = _local(labels[chunk], num_local, how)
            # On ranks without the target 0 is added to class 0.
            taken = is_here.to(wide).mul_(how.smoothing - 1)
            slopes.scatter_add_(-1, local.unsqueeze(-1), taken.unsqueeze(-1))
            slopes.mul_(scale[chunk].unsqueeze(-1))
            if behind is None:
                slopes = slopes.to(x.dtype)
            else:
                (slopes,) = torch.autograd.grad(behind, made, slopes.to(behind.dtype))
                del behind, made
            if dx is not None:
                torch.mm(slopes, by_output, out=dx[chunk])
            if of_weight is not None:
                of_weight.add(rows[chunk], slopes, transposed=how.transposed)
            if of_bias is not None:
                of_bias.add_(slopes.sum(0))
            del slopes
        return (
            None if dx is None else dx.view(x.shape),
            None if of_weight is None else of_weight.fresh,
            of_bias,
            None,
            None,
        )


class _Sum:
    """The gradient of a weight, a sum of products: in the sum so far, or in a tensor of its own."""

    def __init__(self, holder: Tensor | None) -> None:
        """`holder` has the sum so far, if there is one."""
        self._total = None if holder is None else holder.grad
        self.fresh: Tensor | None = None
        """What autograd is to add to the weight's gradient; None: it is there already."""

    def add(self, x: Tensor, slopes: Tensor, *, transposed: bool) -> None:
        """Add what some rows of x and of the gradient of their logits give."""
        left, right = (slopes.t(), x) if transposed else (x.t(), slopes)
        if self._total is not None:
            self._total.addmm_(left, right)
        else:
            self._total = self.fresh = torch.mm(left, right)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
    """Return the logits of some rows as the product makes them."""
    if how.transposed:
        return torch._C._nn.linear(rows, weight, bias)
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def _stepped(made: Tensor, how: _How) -> Tensor:
    """Return what the model's steps make of them."""
    for target, *args in how.steps:
        made = _overload(target)(made, *args)
    return made


def _dtype(made: torch.dtype, how: _How) -> torch.dtype:
    """Return the dtype of logits behind all steps."""
    casts = (dtype for target, dtype, *_ in (step for step in how.steps if step[0] == CAST))
    return [made, *casts][-1]


@cache
def _overload(target: str) -> Any:
    return attrgetter(target)(torch.ops)


def _local(labels: Tensor, num_local: int, how: _How) -> tuple[Tensor, Tensor]:
    """Return where targets lie among this rank's entries of the vocabulary, and which do."""
    local = labels - collectives.rank(how.group) * num_local
    is_here = (local >= 0) & (local < num_local) & (labels != how.ignore_index)
    return local.masked_fill_(~is_here, 0), is_here
