"""Where this process stands among the ranks of a plan, and the process groups around it.

Each pp rank has a mesh of its own (`Plan.mesh`): its ranks as dp x cp x tp. Process groups
are made for

    tp     ranks that hold pieces of one computation
    cp     ranks that hold parts of the same sequences
    data   dp x cp: ranks that hold the same parameters and different data, over which
           gradients are summed and ZeRO shards

and by whoever needs others, through `Mesh.open_group`. Every rank takes part in making every
group, in one order: groups that only their members make are named by how many groups a
process has, which is not equal on ranks of different meshes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlanError
from planner.layout.layout import ProcessMesh
from planner.plan import Plan
from planner.runtime.start import device as devices
from planner.runtime.start.gloo_threads import put_socket_threads_last

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A rank's device, coordinate on each axis, and groups.

    `meshes` are those of all pp ranks. `control` is a gloo group of all ranks, for small
    host messages, whatever the backend. Groups are added and, by `close`, destroyed.
    """

    device: torch.device
    control: dist.ProcessGroup
    meshes: tuple[ProcessMesh, ...]
    sizes: tuple[int, int, int, int]
    coordinate: tuple[int, int, int, int]
    _lines: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _opened: list[dist.ProcessGroup] = field(default_factory=list)

    def size(self, axis: str) -> int:
        """Return the degree of an axis here; of "data", dp times cp."""
        if axis == "data":
            return self.size("dp") * self.size("cp")
        return self.sizes[AXES.index(axis)]

    def rank(self, axis: str) -> int:
        """Return this process's coordinate on an axis."""
        if axis == "data":
            return self.rank("dp") * self.size("cp") + self.rank("cp")
        return self.coordinate[AXES.index(axis)]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of this rank's line along tp, cp or data; None when alone."""
        return self._lines.get(axis)

    def group_name(self, axis: str) -> str:
        """Return the name of that group, empty when alone."""
        group = self.group(axis)
        return "" if group is None else group.group_name

    def open_group(self, groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Make groups of these global ranks; return the (last) one this rank is in.

        Every rank of the plan calls this with the same groups.
        """
        mine = None
        for ranks in groups:
            group = dist.new_group(list(ranks), sort_ranks=False)
            if dist.get_rank() in ranks:
                self._opened.append(group)
                mine = group
        put_socket_threads_last()
        return mine

    def device_mesh(self) -> DeviceMesh:
        """Return the axes data and, if there is one, tp as PyTorch has them, for FSDP2."""
        # Not a tensor: on fake tensors (`dryrun`) ranks could not be looked up in it.
        ranks = np.array(self.meshes[self.rank("pp")].ranks)
        axes = [axis for axis in ("data", "tp") if self.group(axis) is not None]
        return DeviceMesh.from_group(
            [self._lines[axis] for axis in axes],
            self.device.type,
            mesh=ranks.reshape([self.size(axis) for axis in axes]).tolist(),
            mesh_dim_names=tuple(axes),
        )

    def close(self) -> None:
        """Destroy every group made here (but for the default one); all ranks call it."""
        # A rank that leaves a group another is still joining would break it.
        dist.barrier(group=self.control)
        for group in self._opened:
            dist.destroy_process_group(group)
        self._opened.clear()
        self._lines.clear()


def coordinate_of(plan: Plan, rank: int) -> tuple[int, int, int, int]:
    """Return a global rank's place on pp, dp, cp and tp; tp groups are neighbours."""
    pp_rank = rank // (plan.dp * plan.cp * plan.tp)
    dp_rank, cp_rank, tp_rank = plan.mesh(pp_rank).coordinate(rank)
    return pp_rank, dp_rank, cp_rank, tp_rank


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
    coordinate = coordinate_of(plan, dist.get_rank())
    meshes = tuple(plan.mesh(pp_rank) for pp_rank in range(plan.pp))
    dp, cp, tp = meshes[coordinate[0]].shape
    opened = []
    if devices.backend(device) == "gloo":
        control = default_group()
    else:
        control = dist.new_group(backend="gloo")
        opened.append(control)
    mesh = Mesh(
        device=device,
        control=control,
        meshes=meshes,
        sizes=(plan.pp, dp, cp, tp),
        coordinate=coordinate,
        _opened=opened,
    )
    for axis in ("tp", "cp", "data"):
        lines = [line for m in meshes for line in _lines(m, axis) if len(line) > 1]
        group = mesh.open_group(lines)
        if group is not None:
            mesh._lines[axis] = group
    return mesh


def _lines(mesh: ProcessMesh, axis: str) -> Iterable[tuple[int, ...]]:
    if axis != "data":
        return mesh.groups(axis)
    tp = mesh.shape[2]
    return [mesh.ranks[tp_rank::tp] for tp_rank in range(tp)]


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
