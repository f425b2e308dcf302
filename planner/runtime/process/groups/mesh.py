"""Where this process stands among the ranks of a plan, and the process groups around it.

Each pp rank has a mesh of its own (`Plan.mesh`), whose axes are those of
`planner.language.layout.axes`. Process groups are made for

    each axis that blocks are lowered on    ranks that hold parts of one computation
    "data", several axes together           ranks that hold the same parameters, over which
                                            gradients are summed
    "shards" and "copies", its two sides    those of them that ZeRO shards over, and those with
                                            the same shards; the first is "data" without copies

and, through `Mesh.open_group`, by modules that need others. Every rank takes part in making every
group, in one order: groups that only their members make are named by how many groups a
process has, which is not equal on ranks of different meshes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlanError
from planner.language.layout.axes import (
    EXPERT_COPIES,
    EXPERT_DATA,
    EXPERT_SHARDS,
    FOLDED,
    Degrees,
    batch_axes,
    data_axes,
    lowered_axes,
    members,
    split_axes,
)
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.plan import Plan
from planner.runtime.process import device as devices
from planner.runtime.process.groups.alike import differences, told_of_run
from planner.runtime.process.groups.gloo_threads import put_socket_threads_last
from planner.runtime.process.groups.process_group import group_timeout, start_process_group
from planner.runtime.process.groups.splitting import can_split, split
from planner.runtime.process.groups.together import together
from planner.runtime.process.launched import where_ranks_come_from

SHARING = ("copies", "shards")
"""The two sides of the ranks "data" under ZeRO, outermost first."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A rank's device, place in its mesh, and groups. Groups are added and, by `close`, destroyed.

    Attributes:
        device: where its tensors are.
        control: a gloo group of all ranks, for small host messages, whatever the backend.
        meshes: those of all pp ranks.
        pp_rank: this rank's own.
        global_rank: this rank's number among all ranks.
    """

    device: torch.device
    control: dist.ProcessGroup
    meshes: tuple[ProcessMesh, ...]
    pp_rank: int
    global_rank: int
    _lines: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _opened: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def own(self) -> ProcessMesh:
        """The mesh of this rank's pp rank."""
        return self.meshes[self.pp_rank]

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis, "pp", or several axes (`axes.JOINT`)."""
        return len(self.meshes) if name == "pp" else self.own.size(*members(name))

    def rank(self, name: str) -> int:
        """Return this process's number among those."""
        if name == "pp":
            return self.pp_rank
        return self.own.number(self.global_rank, *members(name))

    @property
    def degrees(self) -> Degrees:
        """The sizes of this rank's mesh."""
        folded = {axis.name: self.own.size(axis.name) for axis in FOLDED}
        return Degrees(**dict(zip(self.own.axes, self.own.shape, strict=True)), **folded)

    @property
    def is_first_of_samples(self) -> bool:
        """Whether it is the first of the ranks that compute the same values for the same samples:
        what all of them have alike (the loss) is counted here.
        """
        return all(self.rank(axis.name) == 0 for axis in lowered_axes())

    def first_of_samples(self) -> int:
        """Return the global rank that is the first of those with this rank's samples."""
        return _first_of_samples(self.own, self.global_rank)

    def firsts_of_samples(self) -> set[int]:
        """Return those of all ranks."""
        return {_first_of_samples(each, rank) for each in self.meshes for rank in each.ranks}

    def first_of_samples_in_data(self) -> list[int]:
        """Return which numbers in the "data" group are the first with their samples."""
        own = self.own
        line = next(line for line in own.groups(*members("data")) if self.global_rank in line)
        others = [axis.name for axis in data_axes() if not axis.cuts_batch]
        return [at for at, rank in enumerate(line) if own.number(rank, *others) == 0]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of this rank's line along an axis, "data", "shards" or "copies"; None
        when alone.
        """
        return self._lines.get(name)

    def lowered_groups(self) -> dict[str, dist.ProcessGroup | None]:
        """Return the groups that the collectives inside blocks name, by axis."""
        names = [*(axis.name for axis in lowered_axes()), *(axis.name for axis in FOLDED)]
        return {name: self.group(name) for name in names}

    def group_name(self, axis: str) -> str:
        """Return the name of that group, empty when alone."""
        group = self.group(axis)
        return "" if group is None else group.group_name

    def open_group(
        self, groups: Iterable[tuple[int, ...]], *, for_messages: bool = False
    ) -> dist.ProcessGroup | None:
        """Make groups of these global ranks, of which no two share a rank; return this rank's.

        Every rank of the plan calls this with the same groups, in the same order of calls.
        `for_messages` says that they carry sends and receives alone.
        """
        groups, timeout = list(groups), group_timeout()
        options = devices.message_options(self.device, timeout) if for_messages else None
        mine = None
        if groups and can_split(groups):
            group = split(groups, timeout=timeout, options=options)
            self._opened.append(group)
            mine = group if any(self.global_rank in ranks for ranks in groups) else None
        else:
            for ranks in groups:
                # Not sorted: a rank's number in the group is then its number along the axis.
                group = dist.new_group(
                    list(ranks), timeout=timeout, pg_options=options, sort_ranks=False
                )
                if self.global_rank in ranks:
                    self._opened.append(group)
                    mine = group
        put_socket_threads_last()
        return mine

    def open_host_group(self) -> dist.ProcessGroup:
        """Make a group of all ranks for host messages beside those of `control`."""
        group = dist.new_group(backend="gloo", timeout=group_timeout())
        self._opened.append(group)
        put_socket_threads_last()
        return group

    def device_mesh(self) -> DeviceMesh:
        """Return "copies", "shards" and the axes of parameters' pieces as FSDP2 takes them."""
        # Not a tensor: on fake tensors (`dryrun`) ranks could not be looked up in it.
        own, inner = self.own, [axis.name for axis in reversed(split_axes())]
        # The mesh's dims in the order that FSDP2 reads them: copies, shards, then pieces.
        order = [own.axes.index(axis) for axis in (*members("copies"), *members("shards"), *inner)]
        ranks = np.array(own.ranks).reshape(own.shape).transpose(order)
        return self._device_mesh((*SHARING, *inner), ranks)

    def experts_device_mesh(self) -> DeviceMesh:
        """Return the sides of the experts' mesh as FSDP2 takes them."""
        sides = self.own.folded
        assert sides is not None, "experts lie on a mesh of their own"
        return self._device_mesh(sides.axes, np.array(sides.ranks))

    def _device_mesh(self, names: Iterable[str], ranks: np.ndarray) -> DeviceMesh:
        """Return the mesh of those of these axes that have several ranks; `ranks` row by row."""
        axes = [axis for axis in names if self.group(axis) is not None]
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


def _open_experts_groups(mesh: Mesh) -> None:
    """Make the groups of the experts' mesh; every rank calls it."""
    sides = mesh.own.folded
    assert sides is not None, "experts lie on a mesh of their own"
    names = ["ep", EXPERT_DATA, *(EXPERT_COPIES, EXPERT_SHARDS) * (sides.size(EXPERT_COPIES) > 1)]
    for name in names:
        lines = [line for m in mesh.meshes for line in m.groups(*members(name)) if len(line) > 1]
        group = mesh.open_group(lines)
        if group is not None:
            mesh._lines[name] = group
    if EXPERT_COPIES not in names and EXPERT_DATA in mesh._lines:
        mesh._lines[EXPERT_SHARDS] = mesh._lines[EXPERT_DATA]
    # The ranks that share an expert's matrices are those of tp.
    if sides.size("etp") > 1:
        mesh._lines["etp"] = mesh._lines["tp"]


def _first_of_samples(mesh: ProcessMesh, rank: int) -> int:
    cuts = {axis.name for axis in batch_axes()}
    place = zip(mesh.axes, mesh.coordinate(rank), strict=True)
    return mesh.rank_at(tuple(at if axis in cuts else 0 for axis, at in place))


def coordinate_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return a global rank's pp rank and its place along each axis of its mesh."""
    pp_rank = rank // plan.degrees.num_ranks
    return pp_rank, *plan.mesh(pp_rank).coordinate(rank)


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "the process group has been started"
    return group


def _refuse_other_plans(plan: Plan, control: dist.ProcessGroup) -> None:
    """Raise PlanError on every rank where ranks make a later engine by unlike plans: they would
    wait for each other in groups that not all of them make.
    """
    told = together(control, lambda: told_of_run(plan))
    if differ := differences(told):
        raise PlanError(f"{'; '.join(differ)}; give all nodes the same")


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Join the plan's ranks. Every rank calls this once.

    Uses the default process group when there is one, else starts it from RANK and
    WORLD_SIZE as torchrun, Ray Train and `planner launch` set them, or `take_place` (a plan for
    one rank needs neither). Raises PlanError when the number of processes is not the plan's.
    """
    devices.refuse_blocking_launches(plan.pp, device.type)
    devices.prepare(device)
    # (At the start of the run ranks tell each other their plan before there is a group.)
    is_later = dist.is_initialized()
    if not is_later:
        start_process_group(plan, device)
    if dist.get_world_size() != plan.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks (pp={plan.pp} {plan.degrees}) "
            f"and {dist.get_world_size()} are running; {where_ranks_come_from()}"
        )
    pp_rank, *_ = coordinate_of(plan, dist.get_rank())
    meshes = tuple(plan.mesh(each) for each in range(plan.pp))
    opened = []
    if devices.backend(device) == "gloo":
        control = default_group()
    else:
        control = dist.new_group(backend="gloo", timeout=group_timeout())
        opened.append(control)
    if is_later and dist.get_world_size() > 1:
        _refuse_other_plans(plan, control)
    mesh = Mesh(
        device=device,
        control=control,
        meshes=meshes,
        pp_rank=pp_rank,
        global_rank=dist.get_rank(),
        _opened=opened,
    )
    has_copies = plan.degrees.along("copies") > 1
    # In one order on all ranks, which take part in making every group.
    for name in (*(axis.name for axis in lowered_axes()), "data", *SHARING * has_copies):
        lines = [line for m in meshes for line in m.groups(*members(name)) if len(line) > 1]
        group = mesh.open_group(lines)
        if group is not None:
            mesh._lines[name] = group
    if plan.degrees.expert_parts > 1:
        _open_experts_groups(mesh)
    # Without copies ZeRO shards over all of "data": the same group serves both.
    if not has_copies and "data" in mesh._lines:
        mesh._lines["shards"] = mesh._lines["data"]
    # Where none of the ranks with the same parameters share samples, they have the whole batch.
    if "data" in mesh._lines and mesh.size("data") == mesh.size("batch"):
        mesh._lines["batch"] = mesh._lines["data"]
    return mesh
