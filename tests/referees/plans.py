"""Every answer of a small space, one after the other: what searches are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import comb

from costmodel import Estimate
from planner.graph import ModelGraph
from search import SearchRequest, SearchResult
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.space.shapes import Configuration, recompute_choices
from tests.referees.cuts import all_cuts


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One plan of the space, priced by the cost model in full."""

    configuration: Configuration
    cut: Cut
    estimate: Estimate


def seconds_and_bytes(answers: Iterable[Answer]) -> list[tuple[float, int]]:
    """Return each answer's step time and peak memory."""
    return [(answer.estimate.step_s, answer.estimate.peak_bytes) for answer in answers]


def best_within(limit_bytes: float, some: Iterable[tuple[float, float]]) -> float:
    """Return the least step time of those that fit, infinity where none does."""
    return min((step_s for step_s, peak in some if peak <= limit_bytes), default=float("inf"))


def check_against(best_s: float, limit_bytes: float, result: SearchResult) -> float | None:
    """Check a search's answer against the true best: it fits, its bound is below the best, and
    it is within its gap of it. Return the gap, or None where rightly nothing was found.
    """
    if result.plan is None:
        assert best_s == float("inf")
        return None
    assert result.certificate is not None
    step_s, gap = result.plan.estimate["step_s"], result.certificate.gap
    assert result.plan.estimate["peak_bytes"] <= limit_bytes
    assert result.certificate.lower_bound_s <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= step_s <= best_s / (1 - gap) * (1 + 1e-9)
    return gap


def num_answers(graph: ModelGraph, machine, request: SearchRequest) -> int:
    """Return how many plans `every_answer` goes through at most."""
    candidates = Candidates.of(graph, machine, request)
    total, inner = 0, len(graph.blocks) - 1
    for shape in candidates.shapes(request):
        kinds = len(recompute_choices(shape.recompute))
        tables = len(candidates.tables(shape.tp, shape.microbatch_size, shape.cp))
        for configuration in shape.configurations():
            cuts = comb(inner, configuration.pp - 1) if configuration.vpp == 1 else 1
            total += tables * cuts * kinds**configuration.pp
    return total


def every_answer(graph: ModelGraph, machine, request: SearchRequest) -> Iterator[Answer]:
    """Yield all configurations with all cuts and recompute choices, whether they fit or not.

    With several stages a rank the cut is the even one, as searched, and the choice is each
    rank's.
    """
    candidates = Candidates.of(graph, machine, request)
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            for table in candidates.tables(
                configuration.tp, configuration.microbatch_size, configuration.cp
            ):
                if configuration.vpp == 1:
                    tries = list(all_cuts(candidates.problem(configuration, table, float("inf"))))
                else:
                    even = candidates.even_cut(configuration, table, float("inf"))
                    assert even is not None
                    homes = candidates.plan(configuration, table, even).stage_to_pp_rank
                    kinds = range(len(recompute_choices(configuration.recompute)))
                    tries = [
                        (even.cuts, tuple(by_rank[home] for home in homes))
                        for by_rank in product(kinds, repeat=configuration.pp)
                    ]
                for cuts, choices in tries:
                    cut = Cut(cuts=cuts, choices=choices, value=0.0)
                    answer = candidates.estimate(candidates.plan(configuration, table, cut))
                    yield Answer(configuration=configuration, cut=cut, estimate=answer)
