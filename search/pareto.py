"""The Pareto set: step time against peak memory (and devices, and price).

For each number of devices the search is asked again and again, each time with a memory limit
just under the last answer's peak, until nothing fits. Every answer is the fastest under its
limit, so what the list holds after dropping dominated points is all of the front, as far as
the searches' own gaps are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.plan import Plan
from profiles import Profile
from search.find_plan import find_plan
from search.request import SearchRequest

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan of the front. `cost_per_step` is in the currency of the price, 0 without one."""

    plan: Plan
    num_devices: int
    step_s: float
    peak_bytes: int
    cost_per_step: float

    @property
    def objectives(self) -> tuple[float, ...]:
        """What is compared; less is better in each."""
        return (self.step_s, float(self.peak_bytes), float(self.num_devices), self.cost_per_step)

    def to_dict(self) -> dict[str, object]:
        """JSON form: the figures and the plan's degrees."""
        plan = self.plan
        return {
            "step_s": self.step_s,
            "peak_bytes": self.peak_bytes,
            "num_devices": self.num_devices,
            "cost_per_step": self.cost_per_step,
            **{name: getattr(plan, name) for name in ("dp", "tp", "pp", "vpp", "schedule")},
            "microbatch_size": plan.microbatch_size,
            "zero_stage": plan.zero_stage,
            "recompute": sorted({stage.recompute for stage in plan.stages}),
        }


def find_pareto(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    *,
    num_devices: Sequence[int] = (),
    price_per_device_hour: float = 0.0,
    most_points: int = 16,
    progress: Progress | None = None,
) -> tuple[Point, ...]:
    """Return the non-dominated points, fastest first; empty when nothing fits anywhere.

    `num_devices` are the counts to try (the request's own when empty); those that cannot be
    used with the batch are left out. At most `most_points` memory limits a count are tried.
    """
    points: list[Point] = []
    counts = tuple(num_devices) or (request.num_devices,)
    for done, count in enumerate(counts):
        limit = request.memory_limit_bytes
        for found in range(most_points):
            if progress:
                progress((done + found / most_points) / len(counts), f"{count} devices")
            try:
                asked = replace(request, num_devices=count, memory_limit_bytes=limit)
                plan = find_plan(graph, profile, asked).plan
            except LayoutError:
                if len(counts) == 1:
                    raise
                break
            if plan is None:
                break
            step_s, peak = float(plan.estimate["step_s"]), int(plan.estimate["peak_bytes"])
            cost = price_per_device_hour * count * step_s / 3600.0
            points.append(
                Point(
                    plan=plan, num_devices=count, step_s=step_s, peak_bytes=peak,
                    cost_per_step=cost,
                )
            )  # fmt: skip
            limit = peak - 1
            if limit < 1:
                break
    return tuple(sorted(non_dominated(points), key=lambda point: point.objectives))


def non_dominated(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other is at least as good as in everything and better in one."""
    return [
        point
        for point in points
        if not any(
            other.objectives != point.objectives
            and all(a <= b for a, b in zip(other.objectives, point.objectives, strict=True))
            for other in points
        )
    ]
