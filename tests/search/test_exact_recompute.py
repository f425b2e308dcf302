"""What a stage can't recompute so little as: beside walking the memory of every choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from costmodel.estimate import rank_bytes
from search import SearchRequest
from search.candidates import Candidates
from search.nodes.exact_recompute import ExactRecompute
from search.partition.chain_problem import Cut, InfeasibleStage
from search.partition.least_recompute import with_recompute
from search.priced_configuration import PricedConfiguration
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine
from tests.search.recomputed import candidates_of, only_configuration

MACHINE = Machine()
CUTS = (0, 4, 8)
NUM_WHOLE, PAIRS = 3, tuple(combinations(range(3), 2))
INTERLEAVED = {"vpp": 2, "schedule": "interleaved_1f1b"}


@pytest.fixture(scope="module")
def made():
    candidates = candidates_of(6)
    return candidates, *only_configuration(candidates)


def every_choice(table, stage: int):
    """(choice, until) of a stage, alone or of its first blocks."""
    first, end = CUTS[stage : stage + 2]
    whole = [(choice, 0) for choice in range(NUM_WHOLE)]
    partial = table.partial(("none", "selective", "full"))
    return whole + [
        (NUM_WHOLE + at, until)
        for at in range(len(PAIRS))
        for until in range(first + 1, end + 1)
        if partial[at].freed[until] > partial[at].freed[until - 1]
    ]


def cut_of(stage: int, choice: int, until: int) -> Cut:
    """The other stage recomputes everything."""
    choices, untils = [2, 2], [0, 0]
    choices[stage], untils[stage] = choice, until
    return Cut(cuts=CUTS, choices=tuple(choices), until=tuple(untils), value=0.0)


@pytest.mark.parametrize("bounded", [True, False], ids=["bound", "no bound"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("part", [0.1, 0.4, 0.7, 0.95, 1.0])
def test_what_is_infeasible_is_and_the_fastest_of_the_rest_is_left(made, stage, part, bounded):
    """A limit between what the heaviest and the lightest choice need, each walked job by job."""
    candidates, configuration, table = made
    walked, seconds = {}, {}
    for choice in every_choice(table, stage):
        cut = cut_of(stage, *choice)
        priced = PricedConfiguration(candidates, configuration, table)
        (walked[choice],) = rank_bytes(
            priced.plan(cut),
            candidates.costs,
            [stage],
        )
        recomputed = priced.recompute_by_block(cut)
        seconds[choice] = sum(
            table.recompute_s(recomputed[at])[at] for at in range(*CUTS[stage : stage + 2])
        )
    least, most = min(walked.values()), max(walked.values())
    limit = least + part * (most - least) - (part == 1.0)  # (there the lightest is over by a byte)
    fitting = {choice for choice, found in walked.items() if found <= limit}
    # Without a bound every choice seems to fit, and the walk alone says which do.
    problem = priced.problem(limit if bounded else float("inf"))
    known = InfeasibleStage(stage=stage, first=CUTS[stage], end=CUTS[stage + 1], choice=0)
    exact = ExactRecompute(priced=priced, limit_bytes=limit)
    found = list(exact.infeasible(problem, cut_of(stage, 0, 0), known))
    told = {c for c in walked if any(each.is_in(cut_of(stage, *c)) for each in found)}
    assert not told & fitting
    chosen = with_recompute(replace(problem, infeasible=tuple(found)), cut_of(stage, 0, 0))
    left = chosen.choices[stage], chosen.until[stage]
    assert left in fitting
    assert seconds[left] == pytest.approx(min(seconds[choice] for choice in fitting), rel=1e-9)
    # Each is told of once, faster choices first.
    assert len({each.choice for each in found}) == len(found)
    edges = table.most_edge_bytes(
        CUTS[stage], CUTS[stage + 1], in_flight=2 - stage, receive_ahead=2
    )
    for each in found:
        lightest = max(walked[c] for c in walked if each.is_in(cut_of(stage, *c)))
        assert not each.and_longer or lightest - limit > edges


def test_where_nothing_fits_every_choice_is_infeasible(made):
    candidates, configuration, table = made
    priced = PricedConfiguration(candidates, configuration, table)
    limit = 0.5 * min(
        rank_bytes(
            priced.plan(cut_of(0, 2, 0)),
            candidates.costs,
            [0],
        )
    )
    # A problem that lets everything pass: what fits is settled by the walk alone.
    free = priced.problem(float("inf"))
    exact = ExactRecompute(priced=priced, limit_bytes=limit)
    known = InfeasibleStage(stage=0, first=CUTS[0], end=CUTS[1], choice=0)
    found = tuple(exact.infeasible(free, cut_of(0, 0, 0), known))
    assert all(each.until is None and each.and_longer for each in found)
    assert with_recompute(replace(free, infeasible=found), cut_of(0, 0, 0)) is None


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.97])
def test_of_ranks_with_several_stages_the_highest_level_that_does_not_fit_is_told(part):
    candidates = candidates_of(6, **INTERLEAVED)
    configuration, table = only_configuration(candidates, **INTERLEAVED)
    stages = candidates.interleaved(configuration, table)
    levels = stages.levels

    def cut_at(level: int) -> Cut:
        choices, until = levels.of_stages(np.minimum(level, levels.most))
        return Cut(cuts=stages.cut.cuts, choices=choices, until=until, value=0.0)

    priced = PricedConfiguration(candidates, configuration, table)
    walked = np.array(
        [
            rank_bytes(
                priced.plan(cut_at(level)),
                candidates.costs,
                [0, 1],
            )
            for level in range(int(levels.most.max()) + 1)
        ]
    )
    for rank in (0, 1):
        own = walked[:, rank]
        limit = own.min() + part * (own.max() - own.min())
        highest = int(np.flatnonzero(own > limit).max())
        exact = ExactRecompute(priced=priced, limit_bytes=limit)
        (found,) = exact.too_low(cut_at(0), [rank])
        assert (found.choice, stages.cut.homes[found.stage]) == (highest, rank)
        # From a level in between the same is found.
        (again,) = exact.too_low(cut_at(highest // 2), [rank])
        assert again == found


def test_a_copy_of_a_stage_along_the_chain_needs_as_much():
    """N6: what `InfeasibleStage.repeats` takes for granted, walked job by job."""
    fixed = {"num_devices": 3, "pp": 3}
    candidates = candidates_of(12, **fixed)
    configuration, table = only_configuration(candidates, **fixed)
    first, last, period = table.repetition.part
    assert last - first > 8
    priced = PricedConfiguration(candidates, configuration, table)
    for length, (choice, until) in product((2, 4), ((0, 0), (2, 0), (4, 1), (5, 1))):
        needed = {
            rank_bytes(
                priced.plan(
                    Cut(
                        cuts=(0, start, start + length, table.num_blocks),
                        choices=(0, choice, 0),
                        until=(0, start + until * (choice > 2), 0),
                        value=0.0,
                    )
                ),
                candidates.costs,
                [1],
            )
            for start in range(first, last - length + 1, period)
        }
        assert len(needed) == 1


def test_edges_hold_skips_that_end_inside_and_each_posted_receive():
    model = tiny_models()["unet"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss)
    candidates = Candidates.of(graph, MACHINE, SearchRequest(num_devices=2, global_batch=2))
    table, n = candidates.tables(1, 1)[0], len(graph.blocks)
    makers = {name: block.index for block in graph.blocks for name in block.outputs}

    def crossing(at, end):
        """Bytes of what is made before a block and used from there to an end, each tensor once."""
        names = {x for block in graph.blocks[at:end] for x in block.inputs if makers.get(x, n) < at}
        return sum(
            meta.bytes_at(1) * (1 + meta.requires_grad)
            for meta in (graph.tensor[name] for name in names)
        )

    some_skip = 0
    for first in range(n):
        for end in range(first + 1, n + 1):
            edges = crossing(first, end) + crossing(end, n)
            for ahead, times in ((0, 3), (2, 3), (7, 8)):
                most = table.most_edge_bytes(first, end, in_flight=1, receive_ahead=ahead)
                assert most == pytest.approx(2 * times * edges)
            some_skip += edges > crossing(first, first + 1) + crossing(end, end + 1)
    assert some_skip
