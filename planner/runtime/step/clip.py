"""Gradient clipping by the norm over the whole model, wherever its pieces lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.runtime.start.groups.mesh import Mesh


def clip_gradients(
    shares: Iterable[tuple[nn.Parameter, float]],
    max_norm: float,
    mesh: Mesh,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; return the norm.

    `shares` are this rank's parameters, each with the part of its squared norm that this
    rank contributes, so that over all ranks every element of the model counts once. The
    same on every rank, which all must call it.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, float]]] = defaultdict(list)
    for param, share in shares:
        if param.grad is not None and param.grad.numel():
            # Foreach kernels take tensors of one device and dtype.
            grad = _real(_local(param.grad))
            alike[grad.device, grad.dtype].append((grad, share))
    for (_, dtype), members in alike.items():
        # A share of 0: a copy that another rank (or stage) counts.
        counted = [(grad, share) for grad, share in members if share and grad.numel()]
        if counted:
            # One call for many tensors: on a GPU a launch each would cost more than the reading.
            norms = torch._foreach_norm([grad for grad, _ in counted], dtype=_norm_dtype(dtype))
            weights = torch.tensor([share for _, share in counted], dtype=torch.float64)
            # In fp64: the sum runs over as many terms as the model has tensors, of very different
            # sizes.
            together = torch.stack(norms).double().square() @ weights.to(norms[0].device)
            squares += together.to(mesh.device)
    # Over all ranks of the plan, stages too: shares count an element once wherever its copies are.
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt()
    # The small term is torch.nn.utils.clip_grad_norm_'s, for the same result.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # All copies are scaled, also those that did not count: equal copies must stay equal.
    for (device, dtype), members in alike.items():
        torch._foreach_mul_([grad for grad, _ in members], scale.to(device, dtype))
    return norm


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _real(grad: Tensor) -> Tensor:
    """The gradient as real numbers: |z|^2 is the sum of the squares of both parts of z."""
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
