"""The optimizer's step on the host: gradients go down, new weights come up, bucket by bucket.

    device   gradients of bucket k                               weights of bucket k
                  | down                                                ^ up
    host     slot k % 2 -> optimizer steps on copies of bucket k -> slot k % 2

While the optimizer works on bucket k, the gradients of k + 1 come down and the weights of
k - 1 go up, so the step takes little more than the slowest of the three. Host memory has
one copy of each weight (fp32 beside 16-bit weights), the optimizer's state, and the slots.
What is computed is what the optimizer would compute on the device's own CPU: where device
and host are one, the bits are the same. (ZeRO-Offload, Ren et al. 2021, section 4.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime.stage.host import Host, Ticket
from planner.runtime.state.masters import hand_over

BUCKET_BYTES = 32 * 2**20
_SLOTS = 2
_ALIGNMENT = 64
"""Of a tensor in a slot, in bytes: a cache line, and a multiple of any element."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter: its weight and the sum of its gradients on the device, its copy on the host.

    Without a wider precision the weight has its gradient itself.
    """

    weight: nn.Parameter
    summed: nn.Parameter
    master: nn.Parameter


class HostMasters:
    """Copies in host memory of what one stage trains.

    Has a stage's `named_params`, in which each stands for a sum of gradients.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], host: Host
    ) -> None:
        """`values` gives, by the user's name, the value a copy starts from, in its dtype; one on
        the meta device comes later (`write_back` then brings it to the weight), one without is
        stepped on elsewhere.
        """
        self._named = dict(params)
        self.trained: dict[str, Trained] = {}
        for fqn, weight in params.items():
            if not weight.requires_grad or fqn not in values:
                continue
            value = values[fqn].detach()
            master = host.empty(value.shape, value.dtype)
            if not value.is_meta:
                master.copy_(value)
            if value.dtype != weight.dtype:
                # Has a gradient of the value's shape and dtype, and no values of its own.
                empty = torch.empty((), dtype=value.dtype, device=weight.device)
                self._named[fqn] = nn.Parameter(empty.expand(value.shape))
                weight.register_post_accumulate_grad_hook(partial(hand_over, self._named[fqn]))
            self.trained[fqn] = Trained(weight, self._named[fqn], nn.Parameter(master))

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return what has the gradients, and the parameters that do not train, by name."""
        return dict(self._named)

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the copies, and the parameters that do not train, by name."""
        return self._named | {fqn: member.master for fqn, member in self.trained.items()}

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the copies' values to the weights on the device, at once."""
        for member in self.trained.values():
            member.weight.copy_(member.master)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters whose gradients come down together, and weights go up together.

    `grads` and `weights` are places in a slot, in bytes.
    """

    members: tuple[Trained, ...]
    grads: tuple[int, ...]
    weights: tuple[int, ...]


class HostUpdates:
    """Steps an optimizer on the host over all that a rank trains. Mutable: its slots."""

    def __init__(
        self, trained: Iterable[Trained], optimizer: torch.optim.Optimizer, host: Host
    ) -> None:
        """`optimizer` is over the copies."""
        self._optimizer, self._host = optimizer, host
        most_bytes = BUCKET_BYTES if _passes_over(optimizer) else None
        self._buckets = tuple(_buckets(trained, most_bytes))
        # All buckets take turns in the same slots, which are as large as the largest.
        grads = max(
            (_end(b.grads, [t.summed for t in b.members]) for b in self._buckets), default=0
        )
        weights = max(
            (_end(b.weights, [t.weight for t in b.members]) for b in self._buckets), default=0
        )
        slots = min(_SLOTS, len(self._buckets))
        self._grads = [host.empty((grads,), torch.uint8, is_copied=True) for _ in range(slots)]
        self._weights = [host.empty((weights,), torch.uint8, is_copied=True) for _ in range(slots)]
        # By slot, the copy of weights that still reads it.
        self._leaving: list[Ticket | None] = [None] * slots

    @torch.no_grad()
    def step(self, beside: AbstractContextManager[Any] | None = None) -> None:
        """Train on the gradients that the device holds; its weights are new when this returns.

        A parameter without a gradient is passed over, as ever. The optimizer's first step is made
        inside of `beside`, if given, where other parameters have gradients.
        """
        beside = beside or nullcontext()
        if not self._buckets:
            with self._host.working("update"), beside:
                self._optimizer.step()
        coming = [self._bring_down(index) for index in range(len(self._buckets[:_SLOTS]))]
        for index, bucket in enumerate(self._buckets):
            slot = index % _SLOTS
            present = [
                (member, at_grad, at_weight)
                for member, at_grad, at_weight in zip(
                    bucket.members, bucket.grads, bucket.weights, strict=True
                )
                if member.summed.grad is not None
            ]
            # Two waits: gradients of this bucket are here, and the weights two buckets ago have
            # left the slot.
            coming[slot].wait()
            leaving = self._leaving[slot]
            if leaving is not None:
                leaving.wait()
            with self._host.working(f"update {index}"):
                for member, at_grad, _ in present:
                    member.master.grad = _place(self._grads[slot], at_grad, member.summed)
                # A call of `step` passes over parameters without gradient, so each bucket steps on
                # its own members; gradients of tables are given with the first alone, or they would
                # step once a bucket.
                with beside if index == 0 else nullcontext():
                    self._optimizer.step()
                staged = []
                for member, _, at_weight in present:
                    member.master.grad = None
                    staged.append(
                        (_place(self._weights[slot], at_weight, member.weight), member.weight)
                    )
                    staged[-1][0].copy_(member.master)
            # The optimizer has read this slot of gradients, so it is free for the bucket after
            # next.
            if index + _SLOTS < len(self._buckets):
                coming[slot] = self._bring_down(index + _SLOTS)
            self._leaving[slot] = self._host.up(staged, f"weights {index}")
        # The next forward reads the new weights; the device waits for them, and the host goes on.
        for leaving in self._leaving:
            if leaving is not None:
                leaving.hold_device()

    def _bring_down(self, index: int) -> Ticket:
        bucket = self._buckets[index]
        pairs = [
            (member.summed.grad, _place(self._grads[index % _SLOTS], at, member.summed))
            for member, at in zip(bucket.members, bucket.grads, strict=True)
            if member.summed.grad is not None
        ]
        return self._host.down(pairs, f"gradients {index}")


def _passes_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether several calls of `step`, each with the gradients of some parameters, are one.

    So it is for PyTorch's own, which count steps by parameter and pass over those without a
    gradient; but hooks on a step are called once a step.
    """
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooked


def _buckets(trained: Iterable[Trained], most_bytes: int | None) -> Iterator[_Bucket]:
    """Cut what is trained into buckets of at most so many bytes of gradients (None: one bucket)."""
    members: list[Trained] = []
    filled = 0
    for member in trained:
        if members and most_bytes is not None and filled + _bytes(member.summed) > most_bytes:
            yield _as_bucket(members)
            members, filled = [], 0
        members.append(member)
        filled += _bytes(member.summed)
    if members:
        yield _as_bucket(members)


def _as_bucket(members: list[Trained]) -> _Bucket:
    return _Bucket(
        tuple(members),
        _offsets([member.summed for member in members]),
        _offsets([member.weight for member in members]),
    )


def _offsets(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where tensors lie one after the other, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        # Rounded up to the alignment.
        end += -(-_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT
    return tuple(offsets)


def _end(offsets: tuple[int, ...], tensors: list[nn.Parameter]) -> int:
    return offsets[-1] + _bytes(tensors[-1])


def _place(slot: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of a slot that a tensor's values go to."""
    return slot[offset : offset + _bytes(like)].view(like.dtype).view(like.shape)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
