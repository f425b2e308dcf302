"""A first plan, before any bound is compared: it prunes from the start.

Until there is a plan, nodes are refined by bounds that memory hardly enters, and where memory is
short the best plan is far above them. So a few pipelines of the smallest microbatches are cut
evenly, each with as much recomputation as its memory asks for, and the fastest that fits is taken.
It is an answer like any other, found sooner; what is faster is found by the search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from costmodel.estimate import rank_bytes
from planner.deadline import check_time
from search.branch_and_bound import evaluated_plan
from search.partition.chain_problem import Cut, InfeasibleStage
from search.priced_configuration import PricedConfiguration
from search.search_state import SearchState
from search.space.configuration import Configuration, Shape

_ZERO = 1
"""Stage of ZeRO that is tried, where it may be: states are cut, and gradients exchanged once."""
_NUM_SIZES = 2
"""Microbatch sizes of the same degrees that are tried, the smallest first."""
_MOST_ESTIMATES = 8
"""Plans estimated until one fits."""
_MOST_WALKS = 32
"""Plans of which the memory of some ranks is walked until one fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _EvenPipeline:
    """A configuration cut evenly, without what was found too large."""

    priced: PricedConfiguration
    limit_bytes: float
    """Bytes that a rank may take."""
    infeasible: tuple[InfeasibleStage, ...] = ()
    suspects: tuple[int, ...] = (0,)
    """pp ranks that were too large when it was estimated; before that the first, which has the
    most microbatches in flight.
    """

    @cached_property
    def cut(self) -> Cut | None:
        """Its stages with the recomputation that they need; None if nothing fits."""
        return self.priced.even_cut(self.limit_bytes, self.infeasible)

    def without(self, found: tuple[InfeasibleStage, ...]) -> _EvenPipeline:
        """Return it without more that is too large."""
        return replace(self, infeasible=(*self.infeasible, *found))

    def freeing(self, over_bytes: Mapping[int, float]) -> _EvenPipeline:
        """Return it with as much more recomputation as frees what pp ranks are over."""
        cut, stages = self.cut, self.priced.interleaved
        assert cut is not None, "what has no cut is not in the queue"
        over = np.zeros(self.priced.configuration.pp)
        for rank, num_bytes in over_bytes.items():
            over[rank] = num_bytes
        levels = stages.levels.of_cut(cut.choices, cut.until)
        found = self.without(stages.levels_that_free_less(levels, over))
        return replace(found, suspects=tuple(over_bytes))


def take_first_plan(search: SearchState, shapes: Sequence[Shape]) -> None:
    """Take the fastest of some plans that fits, if one of them does."""
    queue: list[tuple[float, int, bool, _EvenPipeline]] = []
    ticket = count()

    def push(pipeline: _EvenPipeline, step_s: float | None = None) -> None:
        if pipeline.cut is not None:
            value = pipeline.cut.value if step_s is None else step_s
            heapq.heappush(queue, (value, next(ticket), step_s is not None, pipeline))

    if search.progress:
        search.progress(0.0, "looking for a first plan")
    for pipeline in _even_pipelines(search, shapes):
        push(pipeline)
    num_estimates = num_walks = 0
    while queue and num_estimates < _MOST_ESTIMATES and num_walks < _MOST_WALKS:
        check_time()
        value, _, is_simulated, pipeline = heapq.heappop(queue)
        if value >= search.to_beat_s:
            return
        priced, cut = pipeline.priced, pipeline.cut
        assert cut is not None, "what has no cut is not in the queue"
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
                    search.take(done)
                    return
                totals = tuple(int(parts.total) for parts in estimate.memory)
                over = _over(pipeline.limit_bytes, enumerate(totals))
            push(pipeline.freeing(over))


def _over(limit_bytes: float, totals: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Return by how many bytes pp ranks are over a limit, those that are."""
    return {rank: total - limit_bytes for rank, total in totals if total > limit_bytes}


def _even_pipelines(search: SearchState, shapes: Sequence[Shape]) -> Iterator[_EvenPipeline]:
    """Yield even cuts of configurations of the smallest microbatches without cp."""
    for shape in _smallest(shapes):
        layouts = search.candidates.layouts.at(*shape.block_sizes).fastest
        for layout in layouts[:1]:
            for configuration in _tried(shape):
                check_time()
                priced = PricedConfiguration(search.candidates, configuration, layout.table)
                yield _EvenPipeline(priced=priced, limit_bytes=search.memory_limit_bytes)


def _smallest(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """Yield, of each degrees and number of ranks, the shapes of the smallest microbatches, each
    with its shards copied as little as can be.
    """
    groups: dict[tuple, dict[int, Shape]] = {}
    for shape in shapes:
        if shape.sequence_parts == 1:
            sizes = groups.setdefault((shape.block_sizes.degrees, shape.pp), {})
            size = shape.microbatch_size
            if size not in sizes or shape.degrees["rp"] < sizes[size].degrees["rp"]:
                sizes[size] = shape
    for sizes in groups.values():
        yield from (sizes[size] for size in sorted(sizes)[:_NUM_SIZES])


def _tried(shape: Shape) -> Iterator[Configuration]:
    """Yield the configurations with one stage a rank, two and the most, under the usual ZeRO.

    More stages leave ranks less idle, send more messages and have more microbatches in flight.
    """
    zeros = [zero for zero in shape.zeros if zero == _ZERO] or shape.zeros[-1:]
    by_stages = {option[1]: option for option in reversed(shape.options)}
    tried = {by_stages[vpp] for vpp in (1, 2, max(by_stages)) if vpp in by_stages}
    options = tuple(option for option in shape.options if option in tried)
    yield from replace(shape, options=options, zeros=tuple(zeros)).configurations()
