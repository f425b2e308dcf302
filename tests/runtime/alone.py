"""A mesh of one rank, for tests of what runs on each rank alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from planner.language.layout.process_mesh import ProcessMesh
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh


@dataclass(frozen=True)
class Parts:
    """What a rank is told of its mesh: ``parts("batch", 2, 1)`` is the second of two parts."""

    sizes: dict[str, int]
    ranks: dict[str, int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    own: ProcessMesh | None = None

    def size(self, name: str) -> int:
        return self.sizes.get(name, 1)

    def rank(self, name: str) -> int:
        return self.ranks.get(name, 0)

    def group(self, name: str) -> None:
        return None


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan for one rank; starts a process group, which tests/runtime ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    meshes: tuple[ProcessMesh, ...] = tuple(plan.mesh(rank) for rank in range(plan.pp))
    world = dist.group.WORLD
    assert world is not None
    return Mesh(device=torch.device("cpu"), control=world, meshes=meshes, pp_rank=0, global_rank=0)
