"""A user's weights cut for one stage: each rank keeps its own piece of what its blocks use."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError
from planner.language.graph import TensorMeta
from planner.language.layout.pieces import Piece, piece_of
from planner.language.layout.placements import Placements
from planner.runtime.process.groups.mesh import Mesh


def own_piece(whole: Tensor, placements: Placements, mesh: Mesh, fqn: str) -> Tensor:
    """Return a copy of this rank's piece of a parameter. Raises LayoutError if uneven."""
    piece = piece_of(whole.shape, placements, mesh.own, mesh.global_rank, name=fqn)
    found = read(piece, whole)
    if found is whole:
        return whole.clone()
    return found.clone(memory_format=torch.contiguous_format)


def read(piece: Piece, whole: Tensor) -> Tensor:
    """Return what a piece has of a tensor: a view of it, where no dim has several runs."""
    for dim, runs in enumerate(piece.runs):
        if runs == ((0, piece.shape[dim]),):
            continue
        parts = [whole.narrow(dim, start, length) for start, length in runs or ((0, 0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def shape_of(module: nn.Module, meta: TensorMeta) -> Tensor:
    """Return the user's tensor that a graph tensor stands for, without its values."""
    try:
        found = operator.attrgetter(meta.fqn)(module)
    except AttributeError:
        raise ModelError(
            f"the model has no {meta.kind} {meta.fqn!r}, which the plan has; "
            "apply the plan to the model it was made for"
        ) from None
    return torch.empty_like(found.detach(), device="meta")


def constant(meta: TensorMeta) -> Tensor:
    """Return the tensor whose values the graph itself has."""
    shape = [size for size in meta.shape if isinstance(size, int)]
    return torch.tensor(meta.data, dtype=getattr(torch, meta.dtype)).reshape(shape)


def empty_tensors(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers on the meta device, tied ones by each name."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return frozenset(name for name, tensor in named if tensor.is_meta)


def materialized(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or memory for what has no values yet."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, outside autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
