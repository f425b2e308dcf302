"""Recomputing the first blocks of a stage more: the least that fits, and the best plan of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from costmodel import CostCache
from costmodel.time.stage_costs.chain import Split, chain_costs
from profiles import load_profile
from search import SearchRequest, find_plan
from search.partition.chain_problem import Cut, InfeasibleStage
from search.stages.partial_recompute import partial_recomputes
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.referees.plans import (
    best_within,
    check_against,
    every_answer,
    num_answers,
    seconds_and_bytes,
)
from tests.search.machine import Machine
from tests.search.test_referee import ATTENTION, graph_of

CHOICES = ("none", "selective", "full")
PLAIN, INTERLEAVED = ["1f1b", "fthenb", "zb_h1"], ["interleaved_1f1b", "zb_v", "dualpipe_v"]


@pytest.fixture(scope="module", params=["gpt", "unet", "hf-gpt2"])
def chain(request):
    """A chain; skips that reach past stages; a tied embedding."""
    if request.param.startswith("hf-"):
        pytest.importorskip("transformers")
    model = tiny_models()[request.param]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=request.param
    )
    costs = CostCache(graph, load_profile("h100-sxm5-80gb"))
    return chain_costs(costs, Split(microbatch_size=2))


def test_the_least_that_fits_is_found(chain):
    """For every run and room: beside all x, one after the other, by the cost model's own sums."""
    n = chain.num_blocks
    pairs = partial_recomputes(chain, CHOICES)
    assert len(pairs) == 3
    runs = [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    start, end = np.array(runs).T
    found_some = 0
    for pair in pairs:
        light = chain.loads.kept(start, end, pair.light)
        for part in (0.0, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0):
            most = part * light
            until = pair.until(start, end, most)
            again = pair.again_s(start, end, until)
            least = pair.least_again_s(start, end, most)
            for at, (i, j) in enumerate(runs):
                fitting = []
                for x in range(i + 1, j + 1):
                    by_block = [*pair.light[:i], *pair.by_block(i, j, x), *pair.light[j:]]
                    run = np.array([i]), np.array([j])
                    kept = chain.loads.kept(*run, by_block).item()
                    seconds = chain.times.recompute_s(by_block)[i:j].sum()
                    if pair.freed[x] > pair.freed[x - 1] and kept <= most[at] * (1 + 1e-9) + 1e-6:
                        fitting.append((seconds, x))
                if until[at] > j:
                    # (A block that shares its output with a recomputed one may keep a little more
                    # than the sums say, so what they refuse fits in no case.)
                    assert not fitting
                    continue
                found_some += 1
                assert least[at] <= again[at] * (1 + 1e-9)
                if fitting:
                    assert again[at] <= min(fitting)[0] * (1 + 1e-9)
                    assert until[at] <= min(fitting)[1]
    assert found_some > 20


def test_more_is_needed_of_longer_runs_and_less_room(chain):
    """Seconds never fall with a run's end, nor with less room, and never rise with its start."""
    n = chain.num_blocks
    for pair in partial_recomputes(chain, CHOICES):
        room = 0.6 * chain.loads.kept(np.array([0]), np.array([n]), pair.light)
        ends = np.arange(1, n + 1)
        least = pair.least_again_s(0 * ends, ends, np.full(n, room))
        assert (np.diff(least[np.isfinite(least)]) >= -1e-15).all()
        starts = np.arange(n)
        least = pair.least_again_s(starts, np.full(n, n), np.full(n, room))
        assert (np.diff(least[np.isfinite(least)]) <= 1e-15).all()
        tight = pair.least_again_s(0 * ends, ends, np.full(n, 0.5 * room))
        loose = pair.least_again_s(0 * ends, ends, np.full(n, room))
        assert (tight >= loose - 1e-15).all()


def test_a_stage_that_recomputes_enough_is_not_infeasible():
    """Blocks 2..5 need the heavier choice up to 4, as do longer runs that hold them."""
    known = InfeasibleStage(stage=1, first=2, end=6, choice=3, and_longer=True, until=4)

    def cut(first, end, choice, until):
        return Cut(cuts=(0, first, end), choices=(0, choice), until=(0, until), value=0.0)

    assert known.is_in(cut(2, 6, 3, 3))
    assert known.is_in(cut(1, 7, 3, 2))
    assert not known.is_in(cut(2, 6, 3, 4))
    assert not known.is_in(cut(3, 6, 3, 3))
    assert not known.is_in(cut(2, 6, 0, 0))


@pytest.mark.parametrize("and_longer", [False, True])
def test_blocks_stand_for_their_copies_along_the_chain(and_longer):
    """N6: blocks 1..18 repeat every three; 4..8 are infeasible unless 4 and 5 take the heavier."""
    known = InfeasibleStage(
        stage=1, first=4, end=9, choice=3, and_longer=and_longer, until=6, repeats=(1, 19, 3)
    )
    shifts = range(-3, 10, 3)
    for first, end in combinations(range(1, 21), 2):
        copies = [
            shift
            for shift in shifts
            if (first, end) == (4 + shift, 9 + shift)
            or (and_longer and first <= 4 + shift and 9 + shift <= end)
        ]
        for until in range(first, end + 1):
            cut = Cut(cuts=(0, first, end), choices=(0, 3), until=(0, until), value=0.0)
            assert known.is_in(cut) == any(until < 6 + shift for shift in copies)


def random_question(rng):
    """A model on one to three stages, whose other choices are fixed."""
    name = str(rng.choice(["equal", "six", "uneven", "tied", "skip", ATTENTION]))
    graph = graph_of(name)
    pp = int(rng.choice([1, 2, 2, 3] if len(graph.blocks) <= 4 else [1, 2, 2]))
    machine = Machine(
        context_bytes=0.0,
        devices_per_node=pp,
        flop_per_s=float(10 ** rng.uniform(6, 10)),
        bytes_per_s=float(10 ** rng.uniform(6, 10)),
        intra_bytes_per_s=float(10 ** rng.uniform(6, 10)),
        inter_bytes_per_s=float(10 ** rng.uniform(6, 9)),
        alpha_s=float(10 ** rng.uniform(-7, -4)),
    )
    kinds = rng.choice(CHOICES, size=int(rng.choice([2, 3])), replace=False)
    samples = int(rng.choice([4, 8, 16]))
    vpp = 2 if pp == 2 and len(graph.blocks) >= 4 and rng.integers(2) else 1
    schedule = str(rng.choice(INTERLEAVED if vpp > 1 else PLAIN))
    request = SearchRequest(
        num_devices=pp, global_batch=samples * int(rng.choice([4, 6])), pp=pp, tp=1, dp=1, cp=1,
        vpp=vpp, zero=0, microbatch_size=samples, schedule=schedule,
        offload="none", allow=tuple(("recompute", str(kind)) for kind in kinds),
    )  # fmt: skip
    return graph, machine, request


@pytest.mark.parametrize(
    ("instances", "seed"),
    [
        pytest.param(12, 3, id="quick"),
        pytest.param(230, 2, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_the_best_equals_trying_everything(instances, seed):
    """X1, M17: every first part of every stage under every pair of choices, priced in full."""
    rng = np.random.default_rng(seed)
    apart = 0
    for _ in range(instances):
        graph, machine, request = random_question(rng)
        if num_answers(graph, machine, request) > 700:
            continue
        every = seconds_and_bytes(every_answer(graph, machine, request))
        fastest, least = min(every)[1], min(peak for _, peak in every)
        limit = int(least + (fastest - least) * rng.uniform(-0.02, 1.05))
        best = best_within(limit, every)
        limited = replace(request, memory_limit_bytes=limit)
        result = find_plan(graph, machine, limited)
        gap = check_against(best, limit, result)
        assert gap is None or gap < 1e-9
        if gap is not None:
            assert result.plan.estimate["step_s"] <= best * (1 + 1e-9)
            apart += any(stage.recompute_blocks for stage in result.plan.stages)
    assert apart >= instances // 10
