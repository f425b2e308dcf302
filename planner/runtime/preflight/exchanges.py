"""What a plan's groups exchange, in rounds whose groups share no rank and so run at once.

    round 0    tp groups, all at once, as in training
    round 1    data groups
    round 2    pp ranks 0-1 and 2-3
    round 3    pp ranks 1-2                    (pp rank 1 was busy in round 2)
    then       a rank of each node with a rank of each other node: one round less than nodes

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.language.layout.axes import EXPERT_DATA, EXPERT_SHARDS, lowered_axes, members
from planner.language.plan import Plan
from planner.nodes.node_links import rounds_of_pairs
from planner.units import KIB, MIB

SIZES = (64 * KIB, MIB, 16 * MIB, 128 * MIB)
"""Bytes of the whole tensor, in the order in which they are timed, while time allows."""

BETWEEN_NODES = "nodes"
"""The axis of pairs of nodes, which no plan has."""

Shape = tuple[str, int, int]
"""A kind of exchange, ranks on each node, and nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective, or a message there and back, among some ranks."""

    axis: str
    kind: str
    ranks: tuple[int, ...]

    def shape(self, devices_per_node: int) -> Shape:
        """Return what its time depends on where nodes have so many ranks each, in order."""
        # Ranks of a node follow each other.
        nodes = {rank // devices_per_node for rank in self.ranks}
        return self.kind, -(-len(self.ranks) // len(nodes)), len(nodes)


Round = tuple[Exchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRates:
    """What exchanges take by the profile that a plan was priced with.

    `seconds` are of an exchange, given the bytes of the whole tensor. `source` names the profile.
    """

    source: str
    seconds: Callable[[Exchange, int], float]


def planned_rounds(plan: Plan) -> tuple[Round, ...]:
    """Return the rounds of a plan's groups: along each axis, and between neighbouring stages."""
    meshes = [plan.mesh(pp_rank) for pp_rank in range(plan.pp)]
    if plan.zero_stage == 0:
        over_data = [("data", "all_reduce")]
    elif plan.degrees.along("copies") > 1:
        over_data = [("shards", "all_gather"), ("copies", "all_reduce")]
    else:
        over_data = [("data", "all_gather")]
    if plan.degrees["ep"] > 1:
        ranks, kind = (EXPERT_DATA, "all_reduce")
        if plan.zero_stage:
            ranks, kind = (EXPERT_SHARDS, "all_gather")
        over_data += [("ep", "all_to_all"), (ranks, kind)]
    rounds = []
    for name, kind in (*((axis.name, "all_reduce") for axis in lowered_axes()), *over_data):
        lines = [line for mesh in meshes for line in mesh.groups(*members(name))]
        rounds.append(
            tuple(Exchange(axis=name, kind=kind, ranks=line) for line in lines if len(line) > 1)
        )
    homes = plan.stage_to_pp_rank
    neighbours = {tuple(sorted(pair)) for pair in pairwise(homes)}
    for edges in _without_shared_ends(sorted((a, b) for a, b in neighbours if a != b)):
        rounds.append(
            tuple(
                Exchange(axis="pp", kind="send_recv", ranks=pair)
                for a, b in edges
                for pair in zip(meshes[a].ranks, meshes[b].ranks, strict=True)
            )
        )
    return tuple(exchanges for exchanges in rounds if exchanges)


def node_rounds(nodes: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Return rounds in which the first rank of each node meets that of each other node once.

    `nodes` are the ranks of each.
    """
    return tuple(
        tuple(
            Exchange(axis=BETWEEN_NODES, kind="send_recv", ranks=(nodes[a][0], nodes[b][0]))
            for a, b in pairs
        )
        for pairs in rounds_of_pairs(len(nodes))
    )


def _without_shared_ends(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Deal edges to rounds in which no two share an end."""
    rounds: list[list[tuple[int, int]]] = []
    for edge in edges:
        for dealt in rounds:
            if not any(set(edge) & set(other) for other in dealt):
                dealt.append(edge)
                break
        else:
            rounds.append([edge])
    return rounds
