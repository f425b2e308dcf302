"""Gradient clipping by the norm over the whole model, wherever its pieces lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.runtime.start.groups.mesh import Mesh
from planner.runtime.state.to_device import to_device

_Kind = tuple[torch.device, torch.dtype]


class Clipping:
    """Clips what one rank trains. Mutable: the shares are kept on the device from step to step.

    `shares` are this rank's parameters, each with the part of its squared norm that this
    rank contributes, so that over all ranks every element of the model counts once.
    """

    def __init__(self, shares: Iterable[tuple[nn.Parameter, float]], mesh: Mesh) -> None:
        self._shares, self._mesh = tuple(shares), mesh
        self._kept: dict[_Kind, tuple[list[float], Tensor]] = {}

    @torch.no_grad()
    def clip(self, max_norm: float, also: Iterable[tuple[nn.Parameter, float]] = ()) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; return the norm.

        `also` are parameters of this step alone. The norm is the same on every rank, which all
        must call it.
        """
        device = self._mesh.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        alike: dict[_Kind, tuple[list[Tensor], list[float]]] = {}
        for param, share in (*self._shares, *also):
            grad = param.grad
            if grad is None:
                continue
            if isinstance(grad, DTensor):
                grad = grad._local_tensor  # (`to_local` asks more than the clip needs, each time)
            if not grad.numel():
                continue
            # Foreach kernels take tensors of one device and dtype.
            grad = _real(grad)
            grads, counts = alike.setdefault((grad.device, grad.dtype), ([], []))
            grads.append(grad)
            counts.append(share)
        for kind, (grads, counts) in alike.items():
            # A share of 0: a copy that another rank (or stage) counts.
            if not all(counts):
                counted = [(g, share) for g, share in zip(grads, counts, strict=True) if share]
                if not counted:
                    continue
                grads, counts = [g for g, _ in counted], [share for _, share in counted]
            # One call for many tensors: on a GPU a launch each would cost more than the reading.
            norms = torch._foreach_norm(grads, dtype=_norm_dtype(kind[1]))
            # In fp64: the sum runs over as many terms as the model has tensors, of very different
            # sizes.
            together = torch.stack(norms).double().square() @ self._weights(kind, counts)
            squares += to_device(together, device)
        # Over all ranks of the plan, stages too: shares count an element once wherever its copies
        # are.
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        # The small term is torch.nn.utils.clip_grad_norm_'s, for the same result.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # All copies are scaled, also those that did not count: equal copies must stay equal.
        for kind, (grads, _) in alike.items():
            torch._foreach_mul_(grads, scale.to(*kind))
        return norm

    def _weights(self, kind: _Kind, shares: list[float]) -> Tensor:
        """Return shares on their device; they change only with what has a gradient."""
        kept = self._kept.get(kind)
        if kept is None or kept[0] != shares:
            weights = to_device(torch.tensor(shares, dtype=torch.float64), kind[0])
            kept = self._kept[kind] = shares, weights
        return kept[1]


def _real(grad: Tensor) -> Tensor:
    """The gradient as real numbers: |z|^2 is the sum of the squares of both parts of z."""
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
