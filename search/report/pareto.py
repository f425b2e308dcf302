"""The Pareto set: step time, peak memory, number of devices and cost.

For each number of devices, and each of what may be on the host, the search is asked again and
again, each time with a memory limit just under the last answer's peak, until nothing fits. Every
answer is the fastest under its limit, so what the list holds after dropping dominated points is
all of the front, as far as the searches' own gaps are zero. With a price, cost is devices x
seconds: at one number of devices it orders plans as time does, so no further search is needed
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from costmodel.memory.bound import OnHost
from planner.deadline import is_late
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.graph.batch import tokens_per_sample
from planner.language.plan import Plan
from planner.units import HOUR_S
from profiles import Profile
from search.branch_and_bound import Progress
from search.candidates import Candidates
from search.find_plan import search_among
from search.on_host import host_holds, offload_fallbacks
from search.request import SearchRequest
from search.search_state import WarmStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of the front."""

    plan: Plan
    """With its estimate."""
    num_devices: int
    """Devices that it uses."""
    step_s: float
    """Predicted seconds of a step."""
    peak_bytes: int
    """Bytes of the fullest device."""
    cost_per_step: float
    """In the currency of the price; 0 without a price."""
    tokens_per_step: int
    """Tokens of the global batch; 0 for a model that takes none."""

    @property
    def objectives(self) -> tuple[float, ...]:
        """What is compared; less is better in each."""
        return (self.step_s, float(self.peak_bytes), float(self.num_devices), self.cost_per_step)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Cost of a million tokens, None for a model without tokens."""
        return 1e6 * self.cost_per_step / self.tokens_per_step if self.tokens_per_step else None

    def to_dict(self) -> dict[str, object]:
        """JSON form: the figures and the plan's degrees."""
        plan = self.plan
        return {
            "step_s": self.step_s,
            "peak_bytes": self.peak_bytes,
            "num_devices": self.num_devices,
            "cost_per_step": self.cost_per_step,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            **{name: getattr(plan, name) for name in ("dp", "cp", "tp", "pp", "vpp", "schedule")},
            "microbatch_size": plan.microbatch_size,
            "zero_stage": plan.zero_stage,
            "recompute": sorted(set(plan.recompute_by_block)),
            "optimizer_on_host": plan.optimizer_on_host,
            "tables_on_host": list(plan.tables_on_host),
            "activations_on_host": any(stage.activations_on_host for stage in plan.stages),
        }


def find_pareto(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    *,
    num_devices: Sequence[int] = (),
    price_per_device_hour: float = 0.0,
    most_points: int = 64,
    progress: Progress | None = None,
    leave_out: Callable[[int, str], None] | None = None,
) -> tuple[Point, ...]:
    """Return the non-dominated points, fastest first; empty when nothing fits anywhere.

    `num_devices` are the counts to try (the request's own when empty); those that cannot be
    used with the batch are left out, and `leave_out` is told which and why. At most `most_points`
    memory limits are tried of each count and each of what may be on the host, which is all there
    is where `request.offload` is ``auto``. Once a time limit has passed, no further limit is tried.
    """
    points: list[Point] = []
    counts = tuple(num_devices) or (request.num_devices,)
    fallbacks = offload_fallbacks(request.offload, profile, graph)
    kinds = [on_host for fallback in fallbacks for on_host in fallback]
    tokens = request.global_batch * tokens_per_sample(graph)
    for done, (count, on_host) in enumerate(product(counts, kinds)):
        asked = replace(request, num_devices=count)

        def tell(found: int, done: int = done, count: int = count) -> None:
            if progress:
                progress(
                    (done + found / most_points) / len(counts) / len(kinds), f"{count} devices"
                )

        try:
            for plan in _fastest_by_limit(graph, profile, asked, on_host, most_points, tell):
                step_s = float(plan.estimate["step_s"])
                points.append(
                    Point(
                        plan=plan,
                        num_devices=count,
                        step_s=step_s,
                        peak_bytes=int(plan.estimate["peak_bytes"]),
                        cost_per_step=cost_of(price_per_device_hour, count, step_s),
                        tokens_per_step=tokens,
                    )
                )
        except LayoutError as error:
            if len(counts) == 1:
                raise
            if leave_out and on_host == kinds[0]:
                leave_out(count, str(error))
    # Of equal ones the first: what has less on the host.
    unlike = {point.objectives: point for point in reversed(points)}
    return tuple(sorted(non_dominated([*unlike.values()]), key=lambda point: point.objectives))


def _fastest_by_limit(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    on_host: OnHost,
    most_points: int,
    tell: Callable[[int], None],
) -> Iterator[Plan]:
    """Yield the fastest plan, the fastest that needs less memory than that, and so on."""
    candidates = Candidates.of(graph, profile, request, on_host)
    warm_start = WarmStart()
    limit = request.memory_limit_bytes
    for found in range(most_points):
        if is_late():
            return
        tell(found)
        asked = replace(request, memory_limit_bytes=limit)
        plan = search_among(candidates, asked, warm_start=warm_start, runners_up=False).plan
        if plan is None:
            return
        if host_holds(plan, profile):
            yield plan
        limit = int(plan.estimate["peak_bytes"]) - 1
        if limit < 1:
            return


def cost_of(price_per_device_hour: float, num_devices: int, seconds: float) -> float:
    """Return what so many devices cost for so long."""
    return price_per_device_hour * num_devices * seconds / HOUR_S


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
