"""Nodes of plans whose replicas lie on several groups of devices.

Each group holds whole replicas, in the order of the cluster's file, and a replica takes the share
of a microbatch that its devices can do in the time of the others:

    ReplicasOnGroupsNode  the meshes that groups hold whole replicas of
      ReplicasNode        the shares of the replicas on each group, for a shape and a layout
        PipelinesNode     all stage boundaries (`pipelines_on_groups`)

A microbatch of M samples on r_g replicas of group g is cut in shares b_g, sum_g r_g b_g = M. Few
ways to do so are all tried, of many those nearest the proportion to speed.

In a pipeline every stage has replicas on every group, n_g / pp devices of each. On two groups these
are all the pipelines in which a stage lies on both: stages have equally many ranks, so where one
has all devices that another has, and more, the others would be short of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, repeat

from planner.errors import LayoutError
from profiles.profile import DeviceGroup
from search.branch_and_bound import Node
from search.nodes.pipelines_on_groups import APART, pipelines_node
from search.search_state import PLACEMENTS, Outcomes, SearchState
from search.space.configuration import Configuration, Shape
from search.stages.stage_table import StageTable

MOST_SHARES = 64
"""So many ways to share a microbatch are all tried; of more, the nearest to the speeds are."""

Shares = tuple[int, ...]
"""Samples of a microbatch that a replica takes, for each group."""


def replicas_nodes(
    shapes: Sequence[Shape], groups: tuple[DeviceGroup, ...]
) -> Iterator[ReplicasOnGroupsNode]:
    """Yield the root of all such plans, where groups hold whole replicas of any shape."""
    fitting = [
        shape
        for shape in shapes
        if (1 in (vpp for _, vpp in shape.options)) and _replicas(shape, groups)
    ]
    if fitting:
        yield ReplicasOnGroupsNode(bound=0.0, wave=PLACEMENTS, shapes=fitting, groups=groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicasOnGroupsNode(Node[SearchState]):
    """All shapes."""

    shapes: Sequence[Shape]
    groups: tuple[DeviceGroup, ...]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the shares of each shape under each layout."""
        for shape in self.shapes:
            if shape.ep > 1:  # ranks of one exchange would differ in speed
                continue
            replicas = _replicas(shape, self.groups)
            size = shape.block_sizes
            for tables in search.candidates.tables_of_parts(*size, pp=shape.pp):
                node = ReplicasNode(
                    bound=0.0, wave=self.wave, shape=shape, tables=tables, replicas=replicas
                )
                yield replace(node, bound=node.least_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicasNode(Node[SearchState]):
    """A shape with a layout: all shares."""

    shape: Shape
    tables: Mapping[str, StageTable]
    """By group, at the mean of all shares."""
    replicas: Shares
    """On each group."""

    @property
    def least_s(self) -> float:
        """A step time that no shares beat: m M / (pp sum_g (r_g / t_g)). m: microbatches; t_g: the
        seconds of a sample on group g in the largest microbatch there may be, the fewest.
        """
        shape = self.shape
        samples = shape.microbatch_size * sum(self.replicas)
        rate = 0.0
        for (name, table), count in zip(self.tables.items(), self.replicas, strict=True):
            # Every replica takes a sample at least, so the others leave so many to this group.
            others = sum(self.replicas) - count
            most = max((samples - others) // count, 1)
            # Samples a second of the group at its best; groups
            # add up, as replicas run beside each other.
            rate += count * most / _seconds(self.sized(name, most, otherwise=table))
        return shape.num_microbatches * samples / (shape.pp * rate)

    def sized(self, name: str, samples: int, *, otherwise: StageTable | None = None) -> StageTable:
        """Return a group's table at another share; `otherwise` where the layout does not divide
        it, which then raises LayoutError.
        """
        table = replace(self.tables[name], microbatch_size=samples)
        try:
            _seconds(table)
        except LayoutError:
            if otherwise is None:
                raise
            return otherwise
        return table

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the shares worth trying."""
        samples = self.shape.microbatch_size * sum(self.replicas)
        every = list(_all_shares(samples, self.replicas, most=MOST_SHARES + 1))
        if len(every) > MOST_SHARES:
            # Not all ways to share are tried: those left out may be as fast as the bound of all.
            search.leave_open(self.bound)
            speeds = [self.shape.microbatch_size / _seconds(t) for t in self.tables.values()]
            every = list(near_shares(samples, self.replicas, speeds))
        shape = self.shape
        schedules = [schedule for schedule, vpp in shape.options if vpp == 1]
        # Without a pipeline all schedules are the same.
        options = list(product(schedules if shape.pp > 1 else schedules[:1], shape.zeros))
        for shares in every:
            search.num_considered += len(options)
            try:
                tables = [self.sized(*each) for each in zip(self.tables, shares, strict=True)]
            except LayoutError:
                search.prune(APART, len(options))
                continue
            # All replicas wait for each other's gradients: the slowest makes the step.
            slowest_s = max(map(_seconds, tables)) * shape.num_microbatches / shape.pp
            for schedule, zero in options:
                yield pipelines_node(
                    self.configuration(shares, schedule, zero),
                    dict(zip(self.tables, zip(shares, tables, strict=True), strict=True)),
                    bound=max(self.bound, slowest_s),
                )

    def configuration(self, shares: Shares, schedule: str, zero: int) -> Configuration:
        """Return the shape's configuration with these shares."""
        shape = self.shape
        return Configuration(
            degrees=shape.degrees,
            pp=shape.pp,
            vpp=1,
            microbatch_size=shape.microbatch_size,
            num_microbatches=shape.num_microbatches,
            schedule=schedule,
            zero=zero,
            recompute=shape.recompute,
            unit=shape.unit,
            device_groups=("+".join(self.tables),) * shape.pp,
            shares=tuple(
                chain.from_iterable(map(repeat, shares, self.replicas))
                if len(set(shares)) > 1
                else ()
            ),
        )


def _replicas(shape: Shape, groups: Sequence[DeviceGroup]) -> Shares:
    """Return the replicas on each group; none where a group does not hold whole ones."""
    ranks = shape.pp * shape.degrees.num_ranks // shape.batch_parts
    sizes = [group.num_devices for group in groups]
    return () if any(size % ranks for size in sizes) else tuple(size // ranks for size in sizes)


def _seconds(table: StageTable) -> float:
    """Return the seconds of all blocks, forward and backward, of one microbatch."""
    return float((table.forward_s + table.backward_s).sum())


def _all_shares(samples: int, replicas: Shares, *, most: int) -> Iterator[Shares]:
    """Yield up to so many ways to share samples: of a replica on each group, at least one."""
    left = most

    def of(samples: int, counts: Shares) -> Iterator[Shares]:
        first, *others = counts
        if not others:
            if samples >= first and samples % first == 0:
                yield (samples // first,)
            return
        # All other replicas take a sample at least.
        for share in range(1, (samples - sum(others)) // first + 1):
            for rest in of(samples - share * first, tuple(others)):
                yield (share, *rest)

    for shares in of(samples, replicas):
        if not left:
            return
        left -= 1
        yield shares


def near_shares(samples: int, replicas: Shares, speeds: Sequence[float]) -> Iterator[Shares]:
    """Yield ways to share samples near the proportion to speed (samples a second of a replica on
    each group): all but the last group's are at most `NEAR` off it. The equal ones come first.
    """
    parts = sum(replicas)
    if samples % parts == 0:
        yield (samples // parts,) * len(replicas)
    whole = sum(count * speed for count, speed in zip(replicas, speeds, strict=True))
    # Replicas that take samples as they are fast end at the same time.
    ideal = [samples * speed / whole for speed in speeds]
    near = [range(max(1, round(b) - NEAR), round(b) + NEAR + 1) for b in ideal[:-1]]
    *counts, last = replicas
    for shares in product(*near):
        # The last group takes what is left, if its replicas can share it evenly.
        left = samples - sum(b * count for b, count in zip(shares, counts, strict=True))
        if left >= last and left % last == 0 and {*shares, left // last} != {samples / parts}:
            yield (*shares, left // last)


NEAR = 3
"""Samples: how far from the proportion shares are tried."""
