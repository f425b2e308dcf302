"""Ops of ours whose local work depends on the rank: targets ``planner.<name>`` in a program.

Each takes the name of the process group of its axis as the argument `group` (in the
program, the axis itself); the empty name is an axis of size one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.runtime.process import collectives
from planner.runtime.stage.calls.attention_kernels import attend
from planner.runtime.stage.calls.attention_tiles import Sight
from planner.runtime.stage.calls.own_random import own_attention, stream_of, with_own_random_stream
from planner.runtime.stage.calls.ring_attention import ring_attention
from planner.runtime.stage.calls.rows.beyond import A_LABEL, beyond
from planner.runtime.stage.calls.rows.routed_rows import (
    bias_of_runs,
    product_of_runs,
    sort_rows,
    stack_of_runs,
    unsort_rows,
)

__all__ = [
    "batch_norm_by_channel",
    "bias_of_runs",
    "causal_attention",
    "divide_by_count",
    "masked_attention",
    "masked_attention_of_queries",
    "own_key_heads",
    "product_of_runs",
    "ring_attention",
    "sort_rows",
    "stack_of_runs",
    "unsort_rows",
    "vocab_cross_entropy",
    "vocab_embedding",
    "vocab_log_softmax",
    "vocab_nll_loss",
    "with_own_random_stream",
]

_NONE, _MEAN = 0, 1


def vocab_embedding(weight: Tensor, indices: Tensor, padding_idx: int, group: str) -> Tensor:
    """Look up the rows of `weight` this rank holds; rows of other ranks come out as zero.

    `weight` is [vocabulary / ranks, hidden], `indices` count over the whole vocabulary. The
    sum over ranks of the results is the embedding.
    """
    first = collectives.rank(group) * weight.shape[0]
    num_rows = weight.shape[0] * collectives.size(group)
    is_beyond = beyond(indices, num_rows, what="a number of a row of an embedding")
    local = indices - first
    elsewhere = (local < 0) | (local >= weight.shape[0])
    padding = padding_idx - first
    rows = F.embedding(
        local.masked_fill(elsewhere, 0), weight, padding if 0 <= padding < len(weight) else None
    )
    # Zero for rows of others; NaN for those of nobody.
    filled = torch.zeros_like(local, dtype=rows.dtype).masked_fill_(is_beyond, torch.nan)
    return torch.where(elsewhere.unsqueeze(-1), filled.unsqueeze(-1), rows)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    group: str,
) -> Tensor:
    """Cross entropy of logits whose classes are divided among the ranks.

    `logits` is [samples, classes / ranks, …] or [classes / ranks]; `target` holds indices
    over all classes; `reduction` is ATen's number. Ranks exchange the largest logit and
    a few sums of each sample, never the logits; the result is equal on all ranks.
    """
    losses = _VocabCrossEntropy.apply(logits, target, ignore_index, label_smoothing, group)
    if reduction == _NONE:
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == _MEAN else total


def vocab_nll_loss(
    log_probabilities: Tensor, target: Tensor, reduction: int, ignore_index: int, group: str
) -> Tensor:
    """Return one rank's term of the negative log likelihood, where classes are divided.

    `log_probabilities` is [samples, classes / ranks, …] or [classes / ranks]; `target` holds
    indices over all classes. Targets of other ranks' classes count as zero.
    """
    dim = min(1, log_probabilities.dim() - 1)
    num_local = log_probabilities.shape[dim]
    local = target - collectives.rank(group) * num_local
    counts = target != ignore_index
    is_here = (local >= 0) & (local < num_local) & counts
    picked = log_probabilities.gather(dim, local.masked_fill(~is_here, 0).unsqueeze(dim))
    losses = -picked.squeeze(dim).masked_fill(~is_here, 0.0)
    num_classes = num_local * collectives.size(group)
    is_beyond = beyond(target, num_classes, what=A_LABEL, ignored=ignore_index)
    losses = losses.masked_fill(is_beyond & counts, torch.nan)
    if reduction == _NONE:
        return losses
    return losses.sum() / counts.sum() if reduction == _MEAN else losses.sum()


def vocab_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, group: str) -> Tensor:
    """Log-softmax over a dim that is divided among the ranks."""
    x = x if dtype is None else x.to(dtype)
    # Any shift cancels in a softmax, so no gradient passes it; the largest keeps exp from
    # overflowing.
    largest = reduce_over(x.detach().amax(dim, keepdim=True), group, "max")
    shifted = x - largest
    total = shifted.exp().sum(dim, keepdim=True)
    # Classes of this rank leave only their term of the gradient of `total`.
    return shifted - collectives.redistribute(total, group, "P", "R", True).log()


def batch_norm_by_channel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    group: str,
) -> Tensor:
    """BatchNorm in training of one rank's channels: `x` is [n, channels / ranks, …].

    The running statistics are whole on every rank, and stay equal.
    """
    num_local = x.shape[1]
    first = collectives.rank(group) * num_local
    # Copies, because autograd keeps what the kernel is given, and the whole is written below.
    mean, var = (t.narrow(0, first, num_local).clone() for t in (running_mean, running_var))
    y = torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn_enabled)
    moved = torch.stack([mean, var])
    if group:
        moved = collectives.run_step(moved, group, ("all_gather", 1, 0))
    running_mean.copy_(moved[0])
    running_var.copy_(moved[1])
    return y


def divide_by_count(total: Tensor, target: Tensor, ignore_index: int, group: str) -> Tensor:
    """Divide one rank's sum of losses by the number of targets on all ranks.

    Counted are the targets that are not `ignore_index`; the sum over ranks of the results
    is the mean loss.
    """
    count = (target != ignore_index).sum()
    return total / (collectives.run_step(count, group, ("all_reduce", 0, 0)) if group else count)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    segments: int,
    group: str,
    outer_group: str = "",
    outermost_group: str = "",
    mirrored: bool = False,
) -> Tensor:
    """Causal attention of one rank's queries [b, h, q / ranks, d] to all keys [b, h, k, d].

    The queries are this rank's piece of each of `segments` equal parts of the sequence, which are
    `mirrored` or not (`layout.placement.Shard`). Dropout differs on each rank, also of
    `outer_group` and `outermost_group`, over which heads may be divided.
    """
    sight = _of_queries((0, None, None), segments, group, mirrored)
    if dropout_p == 0:
        return attend(query, key, value, None, None, scale, sight)
    # Kernels that drop weights take a mask for each pair.
    positions = sight.positions(query.shape[-2], query.device)
    mask = positions.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
    stream = stream_of(group, outer_group, outermost_group)
    return own_attention(
        stream, query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def own_key_heads(keys: Tensor, queries: int, of_group: int, heads: int, group: str) -> Tensor:
    """Return the heads of keys (or values) [..., K, k, d] that this rank's queries read.

    A rank has `queries` heads of queries; `of_group` of them in a row share a head of keys. Where
    `heads` is `queries`, each gets a copy of one; fewer, and one alone, lie side by side in memory.
    """
    first = collectives.rank(group) * queries
    if queries == heads > 1:
        own = torch.arange(first, first + queries, device=keys.device) // of_group
        return keys.index_select(-3, own)
    return keys.narrow(-3, first // of_group, heads)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: int | None,
    high: int | None,
    chunk: int | None,
    scale: float | None,
    enable_gqa: bool,
    same: Tensor | None,
    keys: Tensor | None,
) -> Tensor:
    """Attention of queries [b, h, q, d] to keys [b, g, k, d] under a mask that is told.

    A query at position p meets a key at k where low <= p - k <= high, both are in the same run of
    `chunk` positions, `same` [b, k] has the same number at both, and `keys` [b, k] is true at k.
    """
    sight = Sight(low, high, chunk, 1, 1, 0)
    return attend(query, key, value, same, keys, scale, sight)


def masked_attention_of_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: int | None,
    high: int | None,
    chunk: int | None,
    scale: float | None,
    enable_gqa: bool,
    same: Tensor | None,
    keys: Tensor | None,
    segments: int,
    group: str,
    mirrored: bool = False,
) -> Tensor:
    """The same of one rank's queries: its piece of each of `segments` parts of the sequence."""
    sight = _of_queries((low, high, chunk), segments, group, mirrored)
    return attend(query, key, value, same, keys, scale, sight)


def _of_queries(
    bounds: tuple[int | None, int | None, int | None], segments: int, group: str, mirrored: bool
) -> Sight:
    """Return what this rank's queries see of all keys."""
    ranks, rank = collectives.size(group), collectives.rank(group)
    return Sight(*bounds, segments, ranks, rank, mirrored=mirrored)


class _VocabCrossEntropy(torch.autograd.Function):
    """Losses by sample, zero where ignored. With p the softmax over all classes and e the
    smoothing, the gradient of a loss by logit c is p[c] - (1 - e) [c is target] - e / C.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, group: str
    ) -> Tensor:
        dim = min(1, logits.dim() - 1)
        x = logits.movedim(dim, -1)
        x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        num_local = x.shape[-1]
        num_classes = num_local * collectives.size(group)
        # Shifted by the largest logit of all ranks, exp cannot overflow. The shift cancels.
        largest = reduce_over(x.amax(-1), group, "max").unsqueeze(-1)
        # One tensor as large as the logits, written over: shifted, exponentials, probabilities. It
        # is the logits' cast where they have one.
        shifted = x - largest if x.dtype == logits.dtype else x.sub_(largest)
        local = target - collectives.rank(group) * num_local
        is_here = (local >= 0) & (local < num_local) & (target != ignore_index)
        local = local.masked_fill(~is_here, 0)
        at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
        total = shifted.sum(-1)
        exponentials = shifted.exp_()
        # Sums over this rank's classes, in one message: of exponentials, of the target's logit (0
        # on ranks that lack it), of all logits (for the smoothing).
        parts = torch.stack([exponentials.sum(-1), at_target, total])
        denominator, at_target, total = reduce_over(parts, group, "sum").unbind(0)
        kept = target != ignore_index
        # (1 - e) (-log p[target]) + e / C sum over c of (-log p[c]), with log p[c] = shifted[c] -
        # log D.
        losses = denominator.log() - (1 - smoothing) * at_target - smoothing / num_classes * total
        is_beyond = beyond(target, num_classes, what=A_LABEL, ignored=ignore_index)
        losses.masked_fill_(is_beyond, torch.nan)
        probabilities = exponentials.div_(denominator.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, is_here, kept)
        ctx.dim, ctx.smoothing, ctx.num_classes, ctx.dtype = (
            dim,
            smoothing,
            num_classes,
            logits.dtype,
        )
        return losses.masked_fill(~kept, 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, is_here, kept = ctx.saved_tensors
        taken = (is_here.to(probabilities.dtype) * (ctx.smoothing - 1)).unsqueeze(-1)
        local = local.unsqueeze(-1)
        slopes = probabilities - ctx.smoothing / ctx.num_classes
        if torch.compiler.is_compiling():
            # The same numbers in a form that one fused kernel makes of the probabilities: a
            # compiler would write what it scatters to apart from what follows.
            classes = torch.arange(slopes.shape[-1], device=slopes.device)
            slopes = slopes + torch.where(classes == local, taken, 0)
        else:
            # On ranks without the target 0 is added to class 0.
            slopes.scatter_add_(-1, local, taken)
        slopes.mul_(grad.masked_fill(~kept, 0).unsqueeze(-1))
        return slopes.movedim(-1, ctx.dim).to(ctx.dtype), None, None, None, None


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each run of rows by its own matrix, in any dtype: for verification, not speed.

    `rows` is [n, k], `weights` [groups, k, m]; `ends` [groups] says where each run ends.
    """
    # Row i belongs to the first run that ends behind it.
    positions = torch.arange(len(rows), device=rows.device)
    owner = torch.searchsorted(ends.long(), positions, right=True)
    return torch.einsum("nk,nkm->nm", rows, weights[owner])


def reduce_over(x: Tensor, group: str, how: str) -> Tensor:
    if not group:
        return x
    all_reduce = torch.ops._c10d_functional.all_reduce
    return collectives.run(
        "all_reduce", lambda: all_reduce(x.contiguous(), how, group), group=group, sent=x
    )


def count_gradient_once(x: Tensor, group: str) -> Tensor:
    """Return `x`; its gradient, the same on every rank, is kept on the first one only.

    For a parameter whose gradient is later summed over the ranks.
    """
    return _CountOnce.apply(x, group) if group else x


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if collectives.rank(ctx.group) == 0 else torch.zeros_like(grad), None
