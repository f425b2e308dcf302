"""Pipelines cut evenly, each with as much recomputation as its memory asks for: plans in a hurry.

They prove nothing. A search begins from the fastest of some that fits (`first_plan`), and names
those of other degrees beside its answer (`report.runners_up`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from costmodel.estimate import rank_bytes
from planner.deadline import check_time
from search.branch_and_bound import EvaluatedPlan, evaluated_plan
from search.partition.chain_problem import Cut, InfeasibleStage
from search.priced_configuration import PricedConfiguration
from search.search_state import SearchState
from search.space.configuration import Configuration, Shape

_ZERO = 1
"""Stage of ZeRO that is tried, where it may be: states are cut, and gradients exchanged once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvenPipeline:
    """A configuration cut evenly, without what was found too large."""

    priced: PricedConfiguration
    limit_bytes: float
    """Bytes that a rank may take."""
    infeasible: tuple[InfeasibleStage, ...] = ()
    ranks_over: tuple[int, ...] = ()
    """Ranks of pp that were over the limit when it was walked or estimated."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks of pp to walk before all: before any is known, the first, which has the most
        microbatches in flight, and the last, which has the logits.
        """
        return self.ranks_over or tuple(dict.fromkeys((0, self.priced.configuration.pp - 1)))

    @cached_property
    def cut(self) -> Cut | None:
        """Its stages with the recomputation that they need; None if nothing fits."""
        return self.priced.even_cut(self.limit_bytes, self.infeasible)

    def without(self, found: tuple[InfeasibleStage, ...]) -> EvenPipeline:
        """Return it without more that is too large."""
        return replace(self, infeasible=(*self.infeasible, *found))

    def freeing(self, over_bytes: Mapping[int, float]) -> EvenPipeline:
        """Return it with as much more recomputation as frees what pp ranks are over."""
        cut, stages = self.cut, self.priced.interleaved
        assert cut is not None, "what has no cut is not in the queue"
        over = np.zeros(self.priced.configuration.pp)
        for rank, num_bytes in over_bytes.items():
            over[rank] = num_bytes
        levels = stages.levels.of_cut(cut.choices, cut.until)
        found = self.without(stages.levels_that_free_less(levels, over))
        return replace(found, ranks_over=tuple(over_bytes))


def plans_that_fit(
    search: SearchState,
    pipelines: Iterable[EvenPipeline],
    *,
    ceiling_s: float,
    most_estimates: int,
    most_walks: int,
    is_wanted: Callable[[Configuration], bool] = lambda _: True,
) -> Iterator[EvaluatedPlan]:
    """Yield those that fit and are faster than a ceiling, the fastest first by its simulation.

    `most_estimates` and `most_walks` of some ranks' memory are made in all. A pipeline that is no
    longer wanted when its turn comes is left out.
    """
    queue: list[tuple[float, int, bool, EvenPipeline]] = []
    ticket = count()

    def push(pipeline: EvenPipeline, step_s: float | None = None) -> None:
        if pipeline.cut is not None:
            value = pipeline.cut.value if step_s is None else step_s
            heapq.heappush(queue, (value, next(ticket), step_s is not None, pipeline))

    for pipeline in pipelines:
        push(pipeline)
    num_estimates = num_walks = 0
    while queue and num_estimates < most_estimates and num_walks < most_walks:
        check_time()
        value, _, is_simulated, pipeline = heapq.heappop(queue)
        if value >= ceiling_s:
            return
        priced, cut = pipeline.priced, pipeline.cut
        assert cut is not None, "what has no cut is not in the queue"
        if not is_wanted(priced.configuration):
            continue
        if too_large := priced.infeasible_ranks(cut, pipeline.limit_bytes):
            push(pipeline.without(too_large))
        elif not is_simulated:
            push(pipeline, priced.quick_step_s(cut))
        else:
            num_walks += 1
            plan = priced.plan(cut)
            # Ranks that are too large spare the walks of all others.
            totals = rank_bytes(plan, search.candidates.costs, pipeline.suspects)
            over = _over(pipeline.limit_bytes, zip(pipeline.suspects, totals, strict=True))
            if not over:
                num_estimates += 1
                estimate = search.candidates.estimate(plan)
                done = evaluated_plan(priced.configuration, plan, estimate)
                if search.fits(done):
                    yield done
                    continue
                totals = tuple(int(parts.total) for parts in estimate.memory)
                over = _over(pipeline.limit_bytes, enumerate(totals))
            push(pipeline.freeing(over))


def _over(limit_bytes: float, totals: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Return by how many bytes pp ranks are over a limit, those that are."""
    return {rank: total - limit_bytes for rank, total in totals if total > limit_bytes}


def plain_configurations(shape: Shape) -> Iterator[Configuration]:
    """Yield the configurations with one stage a rank, two and the most, under the usual ZeRO.

    More stages leave ranks less idle, send more messages and have more microbatches in flight.
    """
    zeros = [zero for zero in shape.zeros if zero == _ZERO] or shape.zeros[-1:]
    by_stages = {option[1]: option for option in reversed(shape.options)}
    tried = {by_stages[vpp] for vpp in (1, 2, max(by_stages)) if vpp in by_stages}
    options = tuple(option for option in shape.options if option in tried)
    yield from replace(shape, options=options, zeros=tuple(zeros)).configurations()
