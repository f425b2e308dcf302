"""Every answer of a small space, one after the other: what searches are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import prod

import numpy as np

from costmodel import Estimate
from planner.language.graph import ModelGraph
from planner.language.plan import Recompute
from search import SearchRequest, SearchResult
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.space.configuration import Configuration, recompute_choices
from search.space.outdone import without_outdone
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One plan of the space, priced by the cost model in full."""

    configuration: Configuration
    cut: Cut
    estimate: Estimate


def seconds_and_bytes(answers: Iterable[Answer]) -> list[tuple[float, int]]:
    """Return each answer's step time and peak memory."""
    return [(answer.estimate.step_s, answer.estimate.peak_bytes) for answer in answers]


OUTDONE_WITHIN = 1e-3
"""By so much of a step a shape that the search leaves out as outdone may win: work on positions
alone, which all samples of a microbatch share."""


def of_kept_shapes(
    answers: Iterable[Answer], graph: ModelGraph, machine, request: SearchRequest
) -> list[Answer]:
    """Return the answers of shapes that no other shape outdoes (`search.space.outdone`)."""
    shapes = without_outdone(tuple(Candidates.of(graph, machine, request).shapes(request)))
    kept = {(shape.degrees, shape.pp, shape.microbatch_size) for shape in shapes}
    return [
        answer
        for answer in answers
        for c in (answer.configuration,)
        if (c.degrees, c.pp, c.microbatch_size) in kept
    ]


def best_within(limit_bytes: float, some: Iterable[tuple[float, float]]) -> float:
    """Return the least step time of those that fit, infinity where none does."""
    return min((step_s for step_s, peak in some if peak <= limit_bytes), default=float("inf"))


def check_against(
    best_s: float, limit_bytes: float, result: SearchResult, *, surely_s: float | None = None
) -> float | None:
    """Check a search's answer against the true best: it fits, its bound is below the best, and
    it is within its gap of it. Return the gap, or None where rightly nothing was found.

    `surely_s` is the least time of plans that fit however fronts of layouts were thinned out; None:
    the best.
    """
    surely_s = best_s if surely_s is None else surely_s
    if result.plan is None:
        assert best_s == float("inf")
        return None
    assert result.certificate is not None
    step_s, gap = result.plan.estimate["step_s"], result.certificate.gap
    assert result.plan.estimate["peak_bytes"] <= limit_bytes
    assert result.certificate.lower_bound_s <= surely_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= step_s <= surely_s / (1 - gap) * (1 + 1e-9)
    return gap


def num_answers(graph: ModelGraph, machine, request: SearchRequest) -> int:
    """Return how many plans `every_answer` goes through at most."""
    candidates = Candidates.of(graph, machine, request)
    total, n = 0, len(graph.blocks)
    for shape in candidates.shapes(request):
        choices = recompute_choices(shape.recompute)
        tables = candidates.tables(*shape.block_sizes)
        for configuration, table in product(shape.configurations(), tables):
            if configuration.vpp > 1:
                most = candidates.interleaved(configuration, table).levels.most
                total += prod(int(level) + 1 for level in most)
                continue
            for cuts in stage_boundaries(n, configuration.pp):
                stages = [len(stage_recomputes(table, choices, *run)) for run in pairwise(cuts)]
                total += prod(stages)
    return total


def stage_boundaries(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all boundaries of stages."""
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield (0, *inner, num_blocks)


def stage_recomputes(
    table: StageTable, choices: tuple[Recompute, ...], first: int, end: int
) -> list[tuple[int, int]]:
    """Return every (choice, until) of a stage's blocks, those that recompute the same once."""
    found: dict[tuple[Recompute, ...], tuple[int, int]] = {}
    for index, choice in enumerate(choices):
        found.setdefault((choice,) * (end - first), (index, 0))
    for index, partial in enumerate(table.partial(choices), start=len(choices)):
        for until in range(first + 1, end + 1):
            found.setdefault(partial.by_block(first, end, until), (index, until))
    return list(found.values())


def every_answer(graph: ModelGraph, machine, request: SearchRequest) -> Iterator[Answer]:
    """Yield all configurations with all cuts and recompute choices, whether they fit or not.

    With one stage a rank its first blocks may recompute more (`stage_recomputes`). With several
    stages a rank the cut is the even one, as searched, and each rank has one of its levels.
    """
    candidates = Candidates.of(graph, machine, request)
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            for table in candidates.tables(*configuration.block_sizes):
                choices = recompute_choices(configuration.recompute)
                tries: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = []
                if configuration.vpp == 1:
                    for cuts in stage_boundaries(table.num_blocks, configuration.pp):
                        of_stages = [
                            stage_recomputes(table, choices, *run) for run in pairwise(cuts)
                        ]
                        tries += [(cuts, stages) for stages in product(*of_stages)]
                else:
                    interleaved = candidates.interleaved(configuration, table)
                    levels, even = interleaved.levels, interleaved.cut.cuts
                    of_ranks = [range(int(most) + 1) for most in levels.most]
                    of_stages = [levels.of_stages(np.array(of)) for of in product(*of_ranks)]
                    tries = [(even, tuple(zip(*found, strict=True))) for found in of_stages]
                for cuts, stages in tries:
                    chosen, until = zip(*stages, strict=True)
                    cut = Cut(cuts=cuts, choices=chosen, until=until, value=0.0)
                    priced = PricedConfiguration(candidates, configuration, table)
                    answer = candidates.estimate(priced.plan(cut))
                    yield Answer(configuration=configuration, cut=cut, estimate=answer)
