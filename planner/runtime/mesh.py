"""The ranks of a plan as a device mesh with named axes, and a gloo group for control."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.errors import PlanError
from planner.plan import Plan
from planner.runtime import device as devices

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this process stands: its device and its coordinate on each axis.

    `control` is a gloo group of all ranks, for small host messages, whatever the backend.
    """

    device: torch.device
    device_mesh: DeviceMesh
    control: dist.ProcessGroup
    sizes: tuple[int, int, int, int]
    coordinate: tuple[int, int, int, int]

    def size(self, axis: str) -> int:
        """Return the degree of an axis."""
        return self.sizes[AXES.index(axis)]

    def rank(self, axis: str) -> int:
        """Return this process's coordinate on an axis."""
        return self.coordinate[AXES.index(axis)]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of this rank's line along an axis; None when alone."""
        return None if self.size(axis) == 1 else self.device_mesh.get_group(axis)

    def peer(self, pp_rank: int) -> int:
        """Return the global rank at the same place of another pp rank."""
        return rank_at(self.sizes, (pp_rank, *self.coordinate[1:]))


def rank_at(sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Return the global rank of a coordinate: pp-major, tp groups are neighbours."""
    rank = 0
    for size, place in zip(sizes, coordinate, strict=True):
        rank = rank * size + place
    return rank


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "the process group has been started"
    return group


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Join the plan's ranks. Every rank calls this once.

    Uses the default process group when there is one, else starts it from RANK and
    WORLD_SIZE as torchrun and `planner launch` set them (a plan for one rank needs
    neither). Raises PlanError when the number of processes is not the plan's.
    """
    devices.prepare(device)
    if not dist.is_initialized():
        _start_process_group(plan, device)
    if dist.get_world_size() != plan.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks (pp={plan.pp} dp={plan.dp} cp={plan.cp} "
            f"tp={plan.tp}) and {dist.get_world_size()} are running; start it with: "
            "planner launch plan.json script.py"
        )
    sizes = (plan.pp, plan.dp, plan.cp, plan.tp)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    if devices.backend(device) == "gloo":
        control = default_group()
    else:
        control = dist.new_group(backend="gloo")
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    pp_rank, dp_rank, cp_rank, tp_rank = coordinate
    return Mesh(
        device=device,
        device_mesh=device_mesh,
        control=control,
        sizes=sizes,
        coordinate=(pp_rank, dp_rank, cp_rank, tp_rank),
    )


def _start_process_group(plan: Plan, device: torch.device) -> None:
    backend = devices.backend(device)
    if "WORLD_SIZE" not in os.environ:
        if plan.world_size > 1:
            raise PlanError(
                f"the plan is for {plan.world_size} ranks and this is a lone process; start it "
                "with: planner launch plan.json script.py"
            )
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    seconds = float(os.environ.get("PLANNER_TIMEOUT_S", "600"))
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )
