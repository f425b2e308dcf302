"""The process groups of messages between pp ranks, and the greeting that connects their ranks.

Gloo matches messages by tag, so all of them go through the group of all ranks. NCCL runs what
one communicator is given in order: a send behind a receive that waits would wait too. There each
direction between two pp ranks has a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from planner.language.lowering.routes import Direction, directions, in_rounds, rank_pairs
from planner.language.lowering.wiring import Edge
from planner.runtime.process import device as devices
from planner.runtime.process.groups.exchange import exchange
from planner.runtime.process.groups.mesh import Mesh, default_group


def open_directions(
    mesh: Mesh, edges: Iterable[Edge], home: Sequence[int]
) -> Mapping[Direction, dist.ProcessGroup]:
    """Return the group of each direction that this rank sends or receives in."""
    directed = directions(edges, home)
    if not devices.p2p_needs_own_groups(mesh.device):
        return dict.fromkeys(directed, default_group())
    groups = {}
    for rivals in in_rounds(directed):
        # Sorted, as a communicator's split demands; who sends is found by global rank.
        ranks = {(a, b): sorted((*mesh.meshes[a].ranks, *mesh.meshes[b].ranks)) for a, b in rivals}
        group = mesh.open_group([tuple(each) for each in ranks.values()], for_messages=True)
        if group is not None:
            groups[next(way for way, each in ranks.items() if mesh.global_rank in each)] = group
    _greet(mesh, groups)
    return groups


def _greet(mesh: Mesh, groups: Mapping[Direction, dist.ProcessGroup]) -> None:
    """Send one number over every pair of ranks.

    A pair's first message connects it, and both hosts wait for that. In a step they could wait
    in a ring; here all go through the directions in one order, and the pairs of one at once.
    """
    greeting = torch.zeros(1, device=mesh.device)
    for (a, b), group in sorted(groups.items(), key=lambda item: item[0]):
        operations = []
        for source, target in rank_pairs(mesh.meshes[a], mesh.meshes[b]):
            if mesh.global_rank == source:
                operations.append(dist.P2POp(dist.isend, greeting, target, group))
            elif mesh.global_rank == target:
                heard = torch.empty_like(greeting)
                operations.append(dist.P2POp(dist.irecv, heard, source, group))
        exchange(operations)
