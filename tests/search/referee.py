"""Every answer of a small space, one after the other: what searches are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import comb

from costmodel import Estimate
from planner.graph import ModelGraph
from search import SearchRequest
from search.brute_force import all_cuts
from search.candidates import Candidates
from search.chain_paths import Cut
from search.space import Configuration, recompute_choices


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One plan of the space, priced by the cost model in full."""

    configuration: Configuration
    cut: Cut
    estimate: Estimate


def num_answers(graph: ModelGraph, machine, request: SearchRequest) -> int:
    """Return how many plans `every_answer` goes through at most."""
    candidates = Candidates.of(graph, machine, request)
    total, inner = 0, len(graph.blocks) - 1
    for shape in candidates.shapes(request):
        kinds = len(recompute_choices(shape.recompute))
        tables = len(candidates.tables(shape.tp, shape.microbatch_size))
        for one in shape.configurations():
            cuts = comb(inner, one.pp - 1) if one.vpp == 1 else 1
            total += tables * cuts * kinds**one.pp
    return total


def every_answer(graph: ModelGraph, machine, request: SearchRequest) -> Iterator[Answer]:
    """Yield all configurations with all cuts and recompute choices, whether they fit or not.

    With several stages a rank the cut is the even one, as searched, and the choice is each
    rank's.
    """
    candidates = Candidates.of(graph, machine, request)
    for shape in candidates.shapes(request):
        for one in shape.configurations():
            for table in candidates.tables(one.tp, one.microbatch_size):
                if one.vpp == 1:
                    tries = list(all_cuts(candidates.problem(one, table, float("inf"))))
                else:
                    even = candidates.even_cut(one, table, float("inf"))
                    assert even is not None
                    homes = candidates.plan(one, table, even).stage_to_pp_rank
                    kinds = range(len(recompute_choices(one.recompute)))
                    tries = [
                        (even.cuts, tuple(by_rank[home] for home in homes))
                        for by_rank in product(kinds, repeat=one.pp)
                    ]
                for cuts, choices in tries:
                    cut = Cut(cuts=cuts, choices=choices, value=0.0)
                    answer = candidates.estimate(candidates.plan(one, table, cut))
                    yield Answer(configuration=one, cut=cut, estimate=answer)
