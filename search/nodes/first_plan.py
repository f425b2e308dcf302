"""A first plan, before any bound is compared: it prunes from the start.

Until there is a plan, nodes are refined by bounds that memory hardly enters, and where memory is
short the best plan is far above them. So a few pipelines of the smallest microbatches are cut
evenly, each with as much recomputation as its memory asks for, and the fastest that fits is taken.
It is an answer like any other, found sooner; what is faster is found by the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.deadline import check_time
from search.nodes.even_pipelines import EvenPipeline, plain_configurations, plans_that_fit
from search.priced_configuration import PricedConfiguration
from search.search_state import SearchState
from search.space.configuration import Shape

_NUM_SIZES = 2
"""Microbatch sizes of the same degrees that are tried, the smallest first."""
_MOST_ESTIMATES = 8
"""Plans estimated until one fits."""
_MOST_WALKS = 32
"""Plans of which the memory of some ranks is walked until one fits."""


def take_first_plan(search: SearchState, shapes: Sequence[Shape]) -> None:
    """Take the fastest of some plans that fits, if one of them does."""
    if search.progress:
        search.progress(0.0, "looking for a first plan")
    found = plans_that_fit(
        search,
        _even_pipelines(search, shapes),
        ceiling_s=search.to_beat_s,
        most_estimates=_MOST_ESTIMATES,
        most_walks=_MOST_WALKS,
    )
    if (done := next(found, None)) is not None:
        search.take(done)


def _even_pipelines(search: SearchState, shapes: Sequence[Shape]) -> Iterator[EvenPipeline]:
    """Yield even cuts of configurations of the smallest microbatches without cp."""
    for shape in _smallest(shapes):
        layouts = search.candidates.layouts.at(*shape.block_sizes).fastest
        for layout in layouts[:1]:
            for configuration in plain_configurations(shape):
                check_time()
                priced = PricedConfiguration(search.candidates, configuration, layout.table)
                yield EvenPipeline(priced=priced, limit_bytes=search.memory_limit_bytes)


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
