"""Gradients summed over the ranks that share a parameter: replicas, and tied copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# As DistributedDataParallel has it: large enough that bandwidth and not latency decides.
BUCKET_BYTES = 25 * 2**20


class GradBuckets:
    """The gradients of one stage as views into flat buckets, all-reduced in place.

    A bucket is one message, and gradients accumulate in it directly, so nothing is copied.
    Parameters go in reverse order: those of the last block have their gradients first.
    Mutable: it holds the reductions under way.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._flats: list[Tensor] = []
        self._under_way: list[dist.Work] = []
        bucket: list[nn.Parameter] = []
        for param in reversed([p for p in params if p.requires_grad]):
            # A bucket is one flat tensor, so of one dtype. A parameter above the limit is a bucket
            # alone.
            is_same_dtype = bucket and bucket[0].dtype == param.dtype
            size = sum(p.numel() * p.element_size() for p in (*bucket, param))
            if bucket and (not is_same_dtype or size > BUCKET_BYTES):
                self._flats.append(_flat_grads(bucket))
                bucket = []
            bucket.append(param)
        if bucket:
            self._flats.append(_flat_grads(bucket))

    def zero(self) -> None:
        """Set every gradient to zero."""
        # Zeros, not None: autograd adds in place only where a gradient is, and the views must stay.
        for flat in self._flats:
            flat.zero_()

    def start(self) -> None:
        """Begin summing over the group; the gradients must be complete."""
        for flat in filter(torch.numel, self._flats):  # (parameters may have no elements)
            # Sums, not means: each part's loss carries its weight (`loss_weights`).
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append(work)

    def finish(self) -> None:
        """Wait for the sums."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()


def _flat_grads(params: Iterable[nn.Parameter]) -> Tensor:
    params = list(params)
    flat = torch.zeros(
        sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
    )
    pieces = flat.split([p.numel() for p in params])
    for param, piece in zip(params, pieces, strict=True):
        # Autograd accumulates into this view, so the bucket is complete without a copy.
        param.grad = piece.view_as(param)
    return flat


class TiedCopies:
    """Copies of one parameter on several stages, kept equal by summing their gradients.

    A tied embedding used by the first and the last stage has a copy on each; every copy
    takes the same optimizer step, so equal values and equal gradients stay equal. `copies`
    gives, by name, this rank's copies; `exchange` takes the sums of their gradients and
    returns the sums over all pp ranks that hold any, which may be the same tensors. The names are
    the same, in the same order, on all of them.
    """

    def __init__(
        self,
        copies: Sequence[Sequence[nn.Parameter]],
        exchange: Callable[[list[Tensor]], list[Tensor]],
    ) -> None:
        self._copies, self._exchange = copies, exchange

    def sum(self) -> None:
        """Replace every copy's gradient by the sum over all copies."""
        totals = []
        for params in self._copies:
            # Copies on this rank first. A copy without a gradient counts as zeros: the exchange is
            # a collective, which all holders have to enter. Gradients are added up where the first
            # lies: a tied table is a large part of a model.
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            total, *others = (_local(param.grad) for param in params if param.grad is not None)
            for other in others:
                total += other
            totals.append(total.contiguous())
        sums = self._exchange(totals)
        for params, total in zip(self._copies, sums, strict=True):
            for param in params:
                assert param.grad is not None
                # In place: it may be a view of a bucket.
                if (grad := _local(param.grad)) is not total:
                    grad.copy_(total)


def _local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor (FSDP2 shards every copy alike), or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
