"""The fastest recomputation of given stages: beside every choice of every stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from search.partition.chain_problem import ChainProblem, Cut, InfeasibleStage
from search.partition.least_recompute import with_recompute
from search.priced_configuration import PricedConfiguration
from tests.search.chains import random_chain
from tests.search.recomputed import candidates_of, only_configuration


def random_cut(rng: np.random.Generator, problem: ChainProblem) -> Cut:
    inner = rng.choice(np.arange(1, problem.num_blocks), problem.num_stages - 1, replace=False)
    cuts = (0, *sorted(inner.tolist()), problem.num_blocks)
    return Cut(cuts=cuts, choices=(0,) * problem.num_stages, value=5.0)


def random_infeasible(rng: np.random.Generator, problem: ChainProblem, cut: Cut) -> InfeasibleStage:
    """Some blocks of a stage of a cut, or all, that do not fit some stage."""
    at = int(rng.integers(problem.num_stages))
    first, end = cut.cuts[at : at + 2]
    and_longer = bool(rng.integers(2))
    if and_longer:
        first = int(rng.integers(first, end))
        end = int(rng.integers(first + 1, end + 1))
    return InfeasibleStage(
        stage=int(rng.integers(problem.num_stages)), first=first, end=end,
        choice=int(rng.integers(len(problem.choices))), and_longer=and_longer,
    )  # fmt: skip


def seconds_where_all_fit(problem: ChainProblem, cut: Cut, choices: tuple[int, ...]) -> float:
    """Backward seconds of a cut's stages under these choices, from the blocks' numbers; infinite
    where one does not fit.
    """
    blocks, total = problem.stages, 0.0
    chosen = replace(cut, choices=choices)
    if any(known.is_in(chosen) for known in problem.infeasible):
        return float("inf")
    for stage, choice in enumerate(choices):
        own = slice(*cut.cuts[stage : stage + 2])
        held = problem.in_flight[stage] * blocks.kept[choice, own].sum()
        held += blocks.working[choice, own].max() + blocks.resident[own].sum()
        held -= blocks.tied * (problem.num_stages == 1)
        if held > problem.memory_limit_bytes:
            return float("inf")
        total += blocks.backward_s[choice, own].sum()
    return total


def test_the_fastest_choices_that_fit_are_found_of_all():
    """M17: of random chains and cuts, some choices being known not to fit a stage."""
    rng = np.random.default_rng(12)
    outcomes = set()
    for _ in range(300):
        problem = random_chain(rng)
        cut = random_cut(rng, problem)
        infeasible = tuple(
            random_infeasible(rng, problem, cut) for _ in range(int(rng.integers(3)))
        )
        problem = replace(problem, infeasible=infeasible)
        every = list(product(range(len(problem.choices)), repeat=problem.num_stages))
        best = min(every, key=lambda choices: seconds_where_all_fit(problem, cut, choices))
        found = with_recompute(problem, cut)
        if seconds_where_all_fit(problem, cut, best) == float("inf"):
            assert found is None
        else:
            assert found == replace(cut, choices=best, until=(0,) * problem.num_stages)
        outcomes.add(None if found is None else frozenset(found.choices))
    assert {None, frozenset({0}), frozenset({1}), frozenset({0, 1})} <= outcomes


def test_answers_are_remembered_for_the_very_same_stage():
    """By stage and run: what was found for other blocks or another stage is no answer."""
    rng = np.random.default_rng(3)
    differ = 0
    for _ in range(60):
        problem = random_chain(rng)
        if problem.num_stages < 2 or len(problem.choices) < 2:
            continue
        cuts = [random_cut(rng, problem) for _ in range(10)]
        alone = [with_recompute(replace(problem), cut) for cut in cuts]
        assert [with_recompute(problem, cut) for cut in (*cuts, *cuts)] == [*alone, *alone]
        differ += len({found and found.choices for found in alone}) > 1
    assert differ > 3


def test_of_a_model_the_first_blocks_recompute_more_where_that_is_enough():
    """The less memory there is the more of a stage is recomputed, at first a part of its blocks."""
    candidates = candidates_of(6)
    configuration, table = only_configuration(candidates)
    cut = Cut(cuts=(0, 4, 8), choices=(0, 0), value=0.0)
    priced = PricedConfiguration(candidates, configuration, table)
    free = priced.problem(float("inf"))
    most = free.stages.costs_of(np.array([0]), np.array([4])).least_bytes(2, 0).item()
    added, untils = [], set()
    for part in np.linspace(1.0, 0.2, 40):
        problem = priced.problem(part * most)
        found = with_recompute(problem, cut)
        if found is None:
            break
        recomputed = priced.recompute_by_block(found)
        own = [table.recompute_s(name)[at] for at, name in enumerate(recomputed)]
        added.append([sum(own[:4]), sum(own[4:])])
        untils.add(found.until[0])
    assert added[0] == [0.0, 0.0]
    assert (np.diff(added, axis=0) >= -1e-15).all()
    assert {0, 2, 3} <= untils
    assert with_recompute(priced.problem(0.01 * most), cut) is None
