"""Ops against the roofline of their device (Williams, Waterman, Patterson, CACM 2009).

    flop per second  <=  min(peak, intensity * memory rate),   intensity = flop / bytes moved

An op far under the roof loses to launches, small sizes or a poor kernel; one on the sloped part is
bound by memory, so fusing helps it and faster arithmetic does not. Ops alike of one class of
blocks are one point. Their seconds are what the profile answers for each op alone; kernels that a
runtime fuses are not shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.cache import CostCache
from costmodel.time.block.compute import op_dtype, op_seconds, op_works
from costmodel.time.plan_price import PlanPrice, stages_of_rank
from profiles.records import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """Ops alike of a class of blocks on one device, of a whole step together."""

    op: str
    """What they compute, such as ``aten.mm``."""
    block_class: str
    """Name of the class of blocks that they are in."""
    direction: Direction
    """Forward, or the gradients of all inputs."""
    dtype: str
    """That it computes in."""
    calls: int
    """How many there are in a step."""
    flop: float
    """Of a step."""
    num_bytes: float
    """Read and written in a step."""
    seconds: float
    """Of a step."""

    @property
    def intensity(self) -> float:
        """Flop per byte."""
        return self.flop / self.num_bytes

    @property
    def flop_per_s(self) -> float:
        """The rate that is reached."""
        return self.flop / self.seconds


def roofline_points(price: PlanPrice, costs: CostCache, pp_rank: int) -> tuple[RooflinePoint, ...]:
    """Return the ops of a pp rank that take time, the longest first; recomputed ones once."""
    plan = price.plan
    sums: dict[tuple[str, str, Direction, str], list[float]] = {}
    for stage in stages_of_rank(plan, pp_rank):
        chain = price.meshes[stage].runs.chain
        split = chain.split
        # Blocks of a class have equal ops, so each class is read once and counted as often as it is
        # used.
        uses: dict[int, int] = {}
        for block in plan.stages[stage].blocks:
            index = costs.graph.blocks[block].class_index
            uses[index] = uses.get(index, 0) + 1
        for index, count in uses.items():
            layouts = tuple(layout for layout in split.layouts if layout.class_index == index)
            local = chain.costs.local(
                index, split.microbatch_size, split.degrees, layouts, logit_rows=split.logit_rows
            )
            calls = count * plan.num_microbatches
            for op in local.ops:
                if op.target == "planner.redistribute":
                    continue
                works = op_works(op, local.tensor)
                took_s = op_seconds(op, local.tensor, chain.costs.profile, works)
                dtype = op_dtype(op, local.tensor)
                for direction, work, seconds in zip(_DIRECTIONS, works, took_s, strict=True):
                    if not seconds or not work.num_bytes:
                        continue
                    key = op.target, local.name, direction, dtype
                    found = sums.setdefault(key, [0, 0.0, 0.0, 0.0])
                    for place, amount in enumerate((1, work.flop, work.num_bytes, seconds)):
                        found[place] += calls * amount
    points = [
        RooflinePoint(
            op=op, block_class=block_class, direction=direction, dtype=dtype,
            calls=int(calls), flop=flop, num_bytes=num_bytes, seconds=seconds,
        )
        for (op, block_class, direction, dtype), (calls, flop, num_bytes, seconds) in sums.items()
    ]  # fmt: skip
    return tuple(sorted(points, key=lambda point: -point.seconds))


_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
