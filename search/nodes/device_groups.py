"""Nodes of plans on a cluster of several groups of devices (`profiles.groups`).

Every pp rank lies on devices of one group, and the ranks of a group follow each other. An order of
the groups is a set of plans, searched as stages with meshes of their own are (`meshes`): a stage
may be of those members that lie on its group.

    DeviceGroupsNode          all orders of the groups, for all shapes
      OwnMeshesNode           those whose stages may have meshes of their own
      PlacedMixNode           one order with meshes
        MixNode               the same under a schedule and a ZeRO stage

Pipelines of several stages a rank are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from planner.errors import LayoutError
from profiles.groups import DeviceGroup
from search.branch_and_bound import Node, Wave
from search.meshes.own_meshes import Member, Mix
from search.nodes.meshes import MeshesNode, any_configuration, mix_node
from search.search_state import MIXES, PLACEMENTS, Outcomes, SearchState
from search.space.configuration import Shape
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroupsNode(MeshesNode):
    """Every order of the groups with every mesh of their stages."""

    groups: tuple[DeviceGroup, ...]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mixes."""
        of_own_meshes = []
        for shapes in self.mixable(search):
            for shape in shapes:
                yield from self.on_orders(search, [shape], self.wave)
            if search.request.meshes == "own" and len(shapes) > 1:
                of_own_meshes.append(shapes)
        if of_own_meshes:
            # They are many, and pruned by the best of those with one mesh for all stages.
            yield OwnMeshesNode(bound=0.0, wave=MIXES, of=self, shapes=of_own_meshes)

    def on_orders(self, search: SearchState, shapes: Sequence[Shape], wave: Wave) -> Outcomes:
        """Yield the mixes of the meshes of these shapes, on each order of the groups."""
        options = sorted({option for shape in shapes for option in shape.options if option[1] == 1})
        zeros = sorted({zero for shape in shapes for zero in shape.zeros})
        for members in members_on_groups(search, shapes):
            for order in rank_orders(self.groups, shapes[0].degrees.num_ranks):
                mix = Mix(members=members, device_groups=order)
                node = PlacedMixNode(
                    bound=mix.least_step_s(),
                    wave=wave,
                    mix=mix,
                    schedules=tuple(schedule for schedule, _ in options),
                    zeros=tuple(zeros),
                )
                search.num_considered += node.num_configurations
                yield node


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnMeshesNode(Node[SearchState]):
    """Every order of the groups with every mix of the meshes of each set of shapes."""

    of: DeviceGroupsNode
    shapes: Sequence[Sequence[Shape]]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mixes."""
        for some in self.shapes:
            yield from self.of.on_orders(search, some, self.wave)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedMixNode(Node[SearchState]):
    """An order of the groups with meshes for their stages.

    Its bound is that of its blocks alone, quick to find; the chain problems of its schedules are
    made where that may win.
    """

    mix: Mix
    schedules: tuple[str, ...]
    zeros: tuple[int, ...]

    @property
    def num_configurations(self) -> int:
        """One for each schedule and ZeRO stage."""
        return len(self.schedules) * len(self.zeros)

    @property
    def label(self) -> str:
        """What is opened."""
        return self.mix.label

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mix under each schedule and ZeRO stage."""
        for schedule, zero in product(self.schedules, self.zeros):
            node = mix_node(search, self.mix.under(schedule, 1, zero), self.wave)
            yield replace(node, bound=max(self.bound, node.bound))


def device_groups_node(
    shapes: Sequence[Shape], groups: tuple[DeviceGroup, ...]
) -> DeviceGroupsNode:
    """Return the root of all plans on several groups.

    Raises LayoutError where no shape has stages that lie on one group each.
    """
    fitting = [
        shape
        for shape in shapes
        if any(vpp == 1 for _, vpp in shape.options)
        and any(True for _ in rank_orders(groups, shape.degrees.num_ranks))
    ]
    if not fitting:
        sizes = " and ".join(str(group.num_devices) for group in groups)
        raise LayoutError(
            f"no pipeline has each stage on one group of devices, of groups of {sizes}: the ranks "
            "of a stage, `num_devices` / `pp`, must divide each group; try another `pp`, `vpp` 1, "
            "or other numbers of nodes"
        )
    return DeviceGroupsNode(bound=0.0, wave=PLACEMENTS, shapes=fitting, groups=groups)


def rank_orders(groups: Sequence[DeviceGroup], ranks_of_stage: int) -> Iterator[tuple[str, ...]]:
    """Yield the groups of pp ranks, one name a rank, for each order of the groups; none where the
    ranks of a stage do not divide a group.
    """
    if any(group.num_devices % ranks_of_stage for group in groups):
        return
    for order in permutations(groups):
        yield tuple(
            group.name for group in order for _ in range(group.num_devices // ranks_of_stage)
        )


def members_on_groups(search: SearchState, shapes: Sequence[Shape]) -> Iterator[tuple[Member, ...]]:
    """Yield every choice of a layout for each shape that has any: a member on each group."""
    by_shape: list[list[tuple[Shape, Mapping[str, StageTable]]]] = []
    for shape in shapes:
        found = search.candidates.tables_of_groups(shape.tp, shape.microbatch_size, shape.cp)
        by_shape += [[(shape, tables) for tables in found]] if found else []
    for chosen in product(*by_shape) if by_shape else ():
        yield tuple(
            Member(configuration=any_configuration(shape), table=table, device_group=name)
            for shape, tables in chosen
            for name, table in tables.items()
        )
