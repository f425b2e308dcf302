"""Roots of plans whose stages have meshes of their own, or lie on groups of devices of their own.

    MeshesNode          ``meshes="own"``: all mixes of the request's shapes
    DeviceGroupsNode    several groups of devices (`profiles.profile`): all orders of the groups
      MixesNode         one choice of meshes, under all schedules and ZeRO stages
        MixNode             the same under one of each: a set of partitions
        InterleavedMixNode  the same with several stages a rank

What may be mixed are shapes of equal cp, pp and microbatches: they differ in how the devices of a
pp rank are divided into dp and tp. Microbatch sizes that the search left out for one mesh are not
mixed (`skipped_sizes`).

Every pp rank lies on devices of one group, and the ranks of a group follow each other. An order of
the groups is a mix as well: a stage may be of those members that lie on its group. There pipelines
of several stages a rank are left out. Plans without a pipeline are in `nodes/replicas_on_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

from planner.language.layout import axes
from planner.language.layout.axes import Degrees, OwnSizes
from profiles.profile import DeviceGroup
from search.branch_and_bound import BEATEN, Node, Wave
from search.meshes.interleaved_mixes import InterleavedMixNode, even_mixes
from search.meshes.mix import Member, Mix
from search.meshes.mix_node import MixNode
from search.search_state import MIXES, PLACEMENTS, Outcomes, SearchState
from search.space.configuration import BlockSizes, Configuration, Shape
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshesNode(Node[SearchState]):
    """Every mix of two or more meshes' tables, with a schedule and a ZeRO stage."""

    shapes: Sequence[Shape]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mixes."""
        for group in _mixable(self.shapes, search.skipped_sizes):
            # A single mesh is searched as a shape.
            if len(group) == 1:
                continue
            options = {option for shape in group for option in shape.options}
            zeros = {zero for shape in group for zero in shape.zeros}
            # Quick: layouts with cp are found only where the work without it, divided, may win.
            if (
                group[0].sequence_parts > 1
                and self._least_with_cp(search, group) >= search.to_beat_s
            ):
                search.num_considered += len(options) * len(zeros)
                search.prune(BEATEN, len(options) * len(zeros))
                continue
            for members in _members(search, group):
                yield _mixes_node(search, Mix(members=members), options, zeros, self.wave)

    def _least_with_cp(self, search: SearchState, group: Sequence[Shape]) -> float:
        """Return a step time that no mix beats: cp divides at best all that blocks do without."""
        without = tuple(
            Member(configuration=_any_configuration(shape), table=table)
            for shape in group
            for table in search.candidates.tables(shape.tp, shape.microbatch_size)
        )
        return Mix(members=without).least_step_s() / group[0].sequence_parts


def meshes_node(shapes: Sequence[Shape]) -> MeshesNode:
    """Return the root of all mixes."""
    return MeshesNode(bound=0.0, wave=MIXES, shapes=shapes)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroupsNode(Node[SearchState]):
    """Every order of the groups with every mix of the meshes of each set of shapes."""

    sets: Sequence[Sequence[Shape]]
    groups: tuple[DeviceGroup, ...]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mixes."""
        for shapes in self.sets:
            options = {option for shape in shapes for option in shape.options if option[1] == 1}
            zeros = {zero for shape in shapes for zero in shape.zeros}
            for members in _members_on_groups(search, shapes):
                for order in rank_orders(self.groups, shapes[0].degrees.num_ranks):
                    mix = Mix(members=members, device_groups=order)
                    yield _mixes_node(search, mix, options, zeros, self.wave)


def device_groups_nodes(
    shapes: Sequence[Shape], groups: tuple[DeviceGroup, ...], *, own_meshes: bool
) -> Iterator[DeviceGroupsNode]:
    """Yield the roots of all plans on several groups: those with one mesh for all stages, then, as
    they are many and the others prune them, those whose stages may have meshes of their own.
    """
    fitting = [
        shape
        for shape in shapes
        if any(vpp == 1 for _, vpp in shape.options)
        and any(True for _ in rank_orders(groups, shape.degrees.num_ranks))
    ]
    mixable = list(_mixable(fitting))
    alone = [[shape] for some in mixable for shape in some]
    if alone:
        yield DeviceGroupsNode(bound=0.0, wave=PLACEMENTS, sets=alone, groups=groups)
    several = [some for some in mixable if len(some) > 1]
    if own_meshes and several:
        yield DeviceGroupsNode(bound=0.0, wave=MIXES, sets=several, groups=groups)


def why_on_no_groups(groups: Sequence[DeviceGroup]) -> str:
    """Return why no plan is searched on these groups, and what to try."""
    sizes = " and ".join(str(group.num_devices) for group in groups)
    return (
        f"no pipeline has each stage on one group of devices, of groups of {sizes}: the ranks of a "
        "stage, `num_devices` / `pp`, must divide each group; and without a pipeline no group "
        "holds whole replicas: `tp` and `cp` must divide each; try another `pp` or `tp`, `vpp` 1, "
        "or other numbers of nodes"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MixesNode(Node[SearchState]):
    """A choice of meshes (and of the order of groups of devices) that stages may have.

    Its bound is that of its blocks alone, quick to find; the chain problems of its schedules are
    made where that may win.
    """

    mix: Mix
    options: tuple[tuple[str, int], ...]
    """Schedules, with stages of each rank."""
    zeros: tuple[int, ...]
    """ZeRO stages."""

    @property
    def num_configurations(self) -> int:
        """One for each schedule and ZeRO stage."""
        return len(self.options) * len(self.zeros)

    @property
    def label(self) -> str:
        """What is opened."""
        return self.mix.label

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mix under each schedule and ZeRO stage."""
        limit_bytes = search.memory_limit_bytes
        for (schedule, vpp), zero in product(self.options, self.zeros):
            mix = self.mix.under(schedule, vpp, zero)
            if vpp == 1:
                yield MixNode(
                    bound=max(self.bound, mix.step_bound_s()),
                    wave=self.wave,
                    configuration=mix.configuration,
                    mix=mix,
                    alone=cache(lambda mix=mix: mix.problems(search.candidates, search.limits)),
                )
                continue
            even = tuple(even_mixes(search.candidates, mix, limit_bytes))
            search.num_considered += len(even) - 1
            for cut in even:
                bound = max(self.bound, cut.step_bound(cut.least_s))
                yield InterleavedMixNode(bound=bound, wave=self.wave, mix=cut)


def _mixes_node(
    search: SearchState, mix: Mix, options: set[tuple[str, int]], zeros: set[int], wave: Wave
) -> MixesNode:
    """Return the node of a choice of meshes, which counts as considered."""
    node = MixesNode(
        bound=mix.least_step_s(),
        wave=wave,
        mix=mix,
        options=tuple(sorted(options)),
        zeros=tuple(sorted(zeros)),
    )
    search.num_considered += node.num_configurations
    return node


def _mixable(
    shapes: Sequence[Shape], skipped_sizes: Set[BlockSizes] = frozenset()
) -> Iterator[list[Shape]]:
    """Yield shapes that stages of one plan may have, together."""
    groups: dict[tuple[OwnSizes, int, int], list[Shape]] = {}
    for shape in shapes:
        size = shape.block_sizes
        if shape.pp > 1 and size not in skipped_sizes:
            key = _common_sizes(shape.degrees), shape.pp, shape.num_microbatches
            groups.setdefault(key, []).append(shape)
    yield from groups.values()


def _common_sizes(degrees: Degrees) -> OwnSizes:
    """Return the sizes on the axes where all stages of a plan have the same."""
    common = [axis.name for axis in axes.AXES if not (axis.own_by_stage or axis.takes_rest)]
    return tuple((name, degrees[name]) for name in common)


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


def _members_on_groups(
    search: SearchState, shapes: Sequence[Shape]
) -> Iterator[tuple[Member, ...]]:
    """Yield every choice of a layout for each shape that has any: a member on each group."""
    by_shape: list[list[tuple[Shape, Mapping[str, StageTable]]]] = []
    for shape in shapes:
        found = search.candidates.tables_of_groups(*shape.block_sizes)
        # A shape that no layout divides takes no part; the others may still be mixed.
        by_shape += [[(shape, tables) for tables in found]] if found else []
    for chosen in product(*by_shape) if by_shape else ():
        yield tuple(
            Member(configuration=_any_configuration(shape), table=table, device_group=name)
            for shape, tables in chosen
            for name, table in tables.items()
        )


def _members(search: SearchState, group: Sequence[Shape]) -> Iterator[tuple[Member, ...]]:
    """Yield every choice of a table for each shape that has any."""
    by_shape = [
        [
            Member(configuration=_any_configuration(shape), table=table)
            for table in search.candidates.tables(*shape.block_sizes)
        ]
        for shape in group
    ]
    some = [members for members in by_shape if members]
    if len(some) > 1:
        yield from product(*some)


def _any_configuration(shape: Shape) -> Configuration:
    """Return a shape's first configuration."""
    return next(shape.configurations())
