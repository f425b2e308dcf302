"""Gradient clipping by the norm over the whole model, wherever its pieces lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.to_device import to_device

Share = tuple[nn.Parameter, float]
"""A parameter, and the part of its squared norm that this rank contributes."""


@dataclass(slots=True)
class _Alike:
    """Parameters of one device and dtype, as foreach kernels take them. Mutable: `weights`.

    Attributes:
        params: each has a gradient of its own device and dtype, or none.
        shares: what each contributes; of none 0, or of all: copies that another rank, or stage,
            counts.
        weights: the shares of those that had a gradient last, on the device; None at first.
        weighed: which had one: the numbers in `params` of those that did not.
    """

    device: torch.device
    dtype: torch.dtype
    params: list[nn.Parameter] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    weights: Tensor | None = None
    weighed: tuple[int, ...] = ()

    def gradients(self) -> list[Tensor]:
        """Return this rank's pieces of the gradients, as real numbers; sets `weights`."""
        grads: list[Tensor | None] = [param.grad for param in self.params]
        without = tuple(n for n, grad in enumerate(grads) if grad is None)
        found = [grad for grad in grads if grad is not None]
        if found and isinstance(found[0], DTensor):
            # (`to_local` asks more than the clip needs, for each.)
            found = [grad._local_tensor for grad in found if isinstance(grad, DTensor)]
        if self.dtype.is_complex:
            # |z|^2 is the sum of the squares of both parts of z.
            found = [torch.view_as_real(grad) for grad in found]
        if self.weights is None or self.weighed != without:
            left = set(without)
            shares = [share for n, share in enumerate(self.shares) if n not in left]
            # Kept on the device: a copy in each step would hold the host there.
            self.weights = to_device(torch.tensor(shares, dtype=torch.float64), self.device)
            self.weighed = without
        return found


class Clipping:
    """Clips what one rank trains.

    `shares` are such that over all ranks every element of the model counts once.
    """

    def __init__(self, shares: Iterable[Share], mesh: Mesh) -> None:
        self._mesh = mesh
        self._alike = _sorted(shares)

    @torch.no_grad()
    def clip(self, max_norm: float, also: Sequence[Share] = ()) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; return the norm.

        `also` are parameters of this step alone. The norm is the same on every rank, which all
        must call it.
        """
        device = self._mesh.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        scaled: list[tuple[_Alike, list[Tensor]]] = []
        for alike in (*self._alike, *_sorted(also)):
            grads = alike.gradients()
            if not grads:
                continue
            scaled.append((alike, grads))
            if not alike.shares[0]:
                continue
            assert alike.weights is not None, "made with the gradients"
            # One call for many tensors: on a GPU a launch each would cost more than the reading.
            norms = torch.stack(torch._foreach_norm(grads, dtype=_norm_dtype(alike.dtype)))
            # In fp64: the sum runs over as many terms as the model has tensors, of very different
            # sizes.
            squares += to_device(norms.double().square() @ alike.weights, device)
        # Over all ranks of the plan, stages too: shares count an element once wherever its copies
        # are.
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        # The small term is torch.nn.utils.clip_grad_norm_'s, for the same result.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # All copies are scaled, also those that did not count: equal copies must stay equal.
        for alike, grads in scaled:
            torch._foreach_mul_(grads, scale.to(alike.device, grads[0].dtype))
        return norm


def _sorted(shares: Iterable[Share]) -> list[_Alike]:
    """Deal parameters by what kernels take together; those without elements here are left out."""
    found: dict[tuple[torch.device, torch.dtype, bool, bool], _Alike] = {}
    for param, share in shares:
        is_piece = isinstance(param, DTensor)
        local = param.to_local() if isinstance(param, DTensor) else param
        if not local.numel():
            continue
        kind = (local.device, local.dtype, is_piece, share > 0)
        alike = found.setdefault(kind, _Alike(local.device, local.dtype))
        alike.params.append(param)
        alike.shares.append(share)
    return list(found.values())


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
