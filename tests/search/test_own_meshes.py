"""D12, M17: stages with meshes of their own, beside every mix there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.schedule.registry import stage_to_pp_rank
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.meshes.mix import Member, Mix
from search.meshes.mixed_stages import mixed_problem
from search.partition.chain_problem import Cut
from search.space.configuration import recompute_choices
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.referees.cuts import all_cuts
from tests.referees.plans import best_within, check_against, every_answer, seconds_and_bytes
from tests.search.machine import Machine


class Pooled(nn.Module):
    """Layers of few weights and long samples, whose samples are best divided, then layers of many
    weights and short ones, which are best divided themselves (Krizhevsky, One weird trick for
    parallelizing convolutional neural networks, 2014)."""

    def __init__(self, narrow: int, wide: tuple[int, ...]):
        super().__init__()
        self.long = nn.ModuleList(nn.Linear(narrow, narrow) for _ in range(2))
        self.short = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((narrow, *wide)))

    def forward(self, x, target):
        for layer in self.long:
            x = torch.relu(layer(x))
        x = x.mean(1)
        for layer in self.short:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


@cache
def pooled(narrow: int, *wide: int) -> ModelGraph:
    def batch(size):
        return {"x": torch.zeros(size, 256, narrow), "target": torch.zeros(size, wide[-1])}

    return capture_module(Pooled(narrow, wide), batch(2), batch(3), name="pooled")


class ByTurns(nn.Module):
    """Long samples and their mean by turns: what suits the stages of one rank under virtual stages
    does not suit the other's."""

    def __init__(self, narrow: int, wide: int):
        super().__init__()
        self.long = nn.ModuleList(nn.Linear(narrow, narrow) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(narrow, wide) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(wide, narrow) for _ in range(2))

    def forward(self, x, target):
        for long, wide, back in zip(self.long, self.wide, self.back, strict=True):
            x = torch.relu(long(x))
            x = x + back(torch.relu(wide(x.mean(1)))).unsqueeze(1)
        return F.mse_loss(x.mean(1), target)


@cache
def by_turns(narrow: int, wide: int) -> ModelGraph:
    def batch(size):
        return {"x": torch.zeros(size, 256, narrow), "target": torch.zeros(size, narrow)}

    return capture_module(ByTurns(narrow, wide), batch(2), batch(3), name="by-turns")


def every_mix(graph, machine, request) -> Iterator[tuple[float, int]]:
    """Yield (seconds, bytes) of all plans whose stages may have a mesh of their own."""
    candidates = Candidates.of(graph, machine, request)
    groups: dict[tuple, list] = {}
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            if configuration.pp > 1:
                key = (
                    configuration.degrees["rp"],
                    configuration.cp,
                    configuration.pp,
                    configuration.num_microbatches,
                    configuration.schedule,
                    configuration.vpp,
                )
                groups.setdefault(key, []).append(configuration)
    for group in groups.values():
        for zero in {configuration.zero for configuration in group}:
            of_zero = {
                configuration.tp: replace(configuration, zero=zero) for configuration in group
            }.values()
            tables = [
                candidates.tables(configuration.tp, configuration.microbatch_size, configuration.cp)
                for configuration in of_zero
            ]
            for some in product(*tables):
                members = tuple(
                    Member(configuration=configuration, table=table)
                    for configuration, table in zip(of_zero, some, strict=True)
                )
                mix = Mix(members=members)
                for cut in every_cut(candidates, mix):
                    answer = candidates.estimate(mix.plan(candidates, cut)[1])
                    yield answer.step_s, answer.peak_bytes


def every_cut(candidates: Candidates, mix: Mix) -> Iterator[Cut]:
    """Yield all cuts of a mix; with several stages a rank the even ones, with all choices of
    ranks."""
    configuration, members = mix.configuration, mix.members
    if configuration.vpp == 1:
        problem = mixed_problem(mix.problems(candidates, {"": float("inf")}))
        for cuts, choices in all_cuts(problem):
            yield Cut(cuts=cuts, choices=choices, value=0.0)
        return
    kinds = range(len(members) * len(recompute_choices(configuration.recompute)))
    homes = stage_to_pp_rank(configuration.schedule, configuration.pp, configuration.vpp)
    for cuts in {candidates.interleaved(m.configuration, m.table).cut.cuts for m in members}:
        for by_rank in product(kinds, repeat=configuration.pp):
            yield Cut(cuts=cuts, choices=tuple(by_rank[home] for home in homes), value=0.0)


def random_machine(rng):
    return Machine(
        context_bytes=0.0,
        devices_per_node=4,
        flop_per_s=float(10 ** rng.uniform(7, 9)),
        bytes_per_s=float(10 ** rng.uniform(8, 9)),
        intra_bytes_per_s=float(10 ** rng.uniform(6, 8)),
        alpha_s=float(10 ** rng.uniform(-7, -4)),
    )


@pytest.mark.parametrize(
    "instances",
    [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["quick", "whole"],
)
def test_the_best_equals_trying_every_mix(instances):
    """Under limits around what the fastest needs; where a mix is best it is found."""
    rng = np.random.default_rng(5)
    gaps, gains = [], []
    for number in range(instances):
        graph = pooled(16, 128, 128) if number % 2 == 0 else pooled(16, 256, 64)
        machine = random_machine(rng)
        allow = [("schedule", str(rng.choice(["1f1b", "zb_h1"]))), ("zero", "0")]
        allow += [("recompute", "none"), ("recompute", str(rng.choice(["none", "full"])))]
        allow += [("zero", "1")] * int(rng.integers(2))
        request = SearchRequest(
            num_devices=4, global_batch=8, pp=2, allow=tuple(allow), offload="none", meshes="own"
        )
        same = seconds_and_bytes(every_answer(graph, machine, request))
        every = [*same, *every_mix(graph, machine, request)]
        limit = int(min(every)[1] * rng.choice([0.8, 1.0, 2.0]))
        best, alone = (best_within(limit, some) for some in (every, same))
        request = replace(request, memory_limit_bytes=limit)
        result = find_plan(graph, machine, request)
        gap = check_against(best, limit, result)
        if gap is None:
            continue
        step_s = result.plan.estimate["step_s"]
        gaps.append(gap)
        gains.append(alone / step_s - 1)
        is_mixed = any(stage.own_sizes for stage in result.plan.stages)
        assert is_mixed == (step_s < alone * (1 - 1e-9))
        if number % 8 == 0:
            other = find_plan(graph, machine, replace(request, solver="ilp"))
            assert other.plan is not None
            most = max(gap, other.certificate.gap)
            other_s = other.plan.estimate["step_s"]
            assert best * (1 - 1e-9) <= other_s <= best / (1 - most) * (1 + 1e-9)
    print(
        f"{len(gaps)} of {instances} fit; a mix wins in {sum(g > 1e-9 for g in gains)}, by up to "
        f"{max(gains):.1%}; largest gap {max(gaps):.2%}"
    )
    assert max(gains) > 0.01
    assert np.mean(np.array(gaps) < 1e-9) >= 0.9


def gain_of_mixing(graph, machine, request, *, factor: float) -> float | None:
    """Check a search against every mix under a limit of so much of what the fastest needs; return
    how much slower the best of one mesh is (0 where that is best, or the best has one mesh, cut as
    suits another), None where nothing fits."""
    same = seconds_and_bytes(every_answer(graph, machine, request))
    every = [*same, *every_mix(graph, machine, request)]
    limit = int(min(every)[1] * factor)
    best, alone = (best_within(limit, some) for some in (every, same))
    result = find_plan(graph, machine, replace(request, memory_limit_bytes=limit))
    gap = check_against(best, limit, result)
    if gap is None:
        return None
    assert gap < 1e-9
    assert result.plan.estimate["step_s"] == pytest.approx(best)
    is_mixed = any(stage.own_sizes for stage in result.plan.stages)
    assert not is_mixed or best < alone * (1 - 1e-9)
    return alone / best - 1 if is_mixed else 0.0


@pytest.mark.parametrize(
    "instances",
    [4, pytest.param(48, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["quick", "whole"],
)
def test_virtual_stages_equal_trying_every_mix(instances):
    """With several stages a rank, in a loop or a V; where a mix of ranks is best it is found."""
    rng = np.random.default_rng(14)
    gains = []
    for number in range(instances):
        graph = by_turns(16, 256) if number % 2 == 0 else pooled(16, 128, 128)
        machine = random_machine(rng)
        schedule = ["interleaved_1f1b", "zb_v", "dualpipe_v"][number % 3]
        allow = [("schedule", schedule), ("zero", "0"), ("recompute", "none"), ("vpp", "2")]
        allow += [("zero", "1")] * int(rng.integers(2))
        allow += [("recompute", "full")] * int(rng.integers(2))
        request = SearchRequest(
            num_devices=4, global_batch=8, pp=2, allow=tuple(allow), offload="none", meshes="own"
        )
        gain = gain_of_mixing(graph, machine, request, factor=rng.choice([0.8, 1.0, 2.0]))
        gains += [] if gain is None else [gain]
    wins = [gain for gain in gains if gain > 1e-9]
    print(f"{len(gains)} of {instances} fit; a mix wins in {len(wins)}, by up to {max(gains):.1%}")
    assert max(gains) > 0.01


@pytest.mark.parametrize(
    "instances",
    [2, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["quick", "whole"],
)
def test_parts_of_sequences_beside_own_meshes_equal_trying_every_mix(instances):
    """cp is one for all stages; dp and tp change places between them."""
    rng = np.random.default_rng(7)
    gpt = tiny_models()["gpt"]
    graph = capture_module(gpt.build(), gpt.batch(2), gpt.batch(3), loss=gpt.loss, name="gpt")
    gains = []
    for number in range(instances):
        allow = (("schedule", "1f1b" if number % 2 == 0 else "interleaved_1f1b"),)
        allow += (("zero", str(rng.choice([0, 1]))), ("recompute", "none"))
        request = SearchRequest(
            num_devices=8, global_batch=4, pp=2, cp=2, allow=allow, offload="none", meshes="own"
        )
        factor = rng.choice([0.9, 1.0, 2.0])
        gain = gain_of_mixing(graph, random_machine(rng), request, factor=factor)
        gains += [] if gain is None else [gain]
    print(f"{len(gains)} of {instances} fit; a mix wins by up to {max(gains):.1%}")
    assert gains


def test_other_words_are_refused():
    with pytest.raises(LayoutError, match="`meshes` mixed was given; use same"):
        SearchRequest(num_devices=4, global_batch=4, meshes="mixed")  # type: ignore[arg-type]
