"""Gradient clipping by the norm over the whole model, wherever its pieces lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.runtime.mesh import Mesh


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
    grads = []
    for param, share in shares:
        if param.grad is None:
            continue
        grad = _local(param.grad)
        grads.append(grad)
        if share and grad.numel():
            norm = torch.linalg.vector_norm(grad, dtype=_norm_dtype(grad))
            squares += norm.double().square().to(mesh.device) * share
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt()
    # The small term is torch.nn.utils.clip_grad_norm_'s, for the same result.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norm_dtype(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32
