"""A script's own tensors over a plan's ranks, as PyTorch's DTensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from planner.errors import LayoutError
from planner.language.layout.axes import split_axes
from planner.runtime.process.groups.mesh import SHARING, Mesh


def shard_tensor(tensor: Tensor, mesh: Mesh, dims: Mapping[str, int]) -> DTensor:
    """Return `tensor`, which every rank of a mesh has whole, with each rank keeping its piece.

    `dims` says along which dim each axis cuts: "data" (all replicas) or an axis that cuts
    parameters ("tp"); elsewhere the tensor is replicated. Uneven pieces are allowed, as
    `torch.distributed.tensor` has them; ``full_tensor()`` gives the whole again. Nothing is sent.
    Raises LayoutError for another axis, or a dim that the tensor does not have.
    """
    known = ("data", *(axis.name for axis in split_axes()))
    for axis, dim in dims.items():
        if axis not in known:
            raise LayoutError(f"axis {axis!r} cuts no tensor; use {' or '.join(known)}")
        if not -tensor.dim() <= dim < tensor.dim():
            raise LayoutError(
                f"a tensor of shape {tuple(tensor.shape)} has no dim {dim}, along which "
                f"{axis!r} is to cut it; use {-tensor.dim()} to {tensor.dim() - 1}"
            )
    devices = _devices(mesh)
    names = devices.mesh_dim_names or ()
    sides = ["data" if name in SHARING else name for name in names]
    places = [Shard(dims[side]) if side in dims else Replicate() for side in sides]
    # Every rank has the values: taking them from the first would be a broadcast.
    return distribute_tensor(
        tensor.to(mesh.device), devices, places or [Replicate()], src_data_rank=None
    )


def _devices(mesh: Mesh) -> DeviceMesh:
    if any(mesh.group(axis) is not None for axis in ("data", *(a.name for a in split_axes()))):
        return mesh.device_mesh()
    # A rank alone has no groups, and a mesh of it needs none.
    alone = torch.tensor([mesh.global_rank])
    return DeviceMesh(mesh.device.type, alone, _init_backend=False)
