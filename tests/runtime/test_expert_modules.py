"""Experts that are modules of their own, in a loop, on ranks of ep: each rank has the parameters of
its own experts, under the names that the user gave them. In `modules-gpt` no row chooses the last
expert, which has no gradient in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import check_experts, cuts_rows, experts_of, grouped_products
from planner.language.lowering.holdings import Holdings
from planner.language.lowering.propagate import propagate_layout
from planner.language.lowering.wiring import param_placements
from planner.language.plan import Plan
from tests.builders import HIDDEN, gpt_batch
from tests.captures import capture_module
from tests.experts import ExpertModules, RoutedGPT
from tests.runtime.checkpoint.scenarios import Case
from tests.runtime.checkpoint.test_round_trips import check as check_checkpoints
from tests.runtime.scenarios import RTOL, capture, check, check_plans, clip_many
from tests.spawn import run_ranks


def plan_of(name: str = "modules-gpt", **choices: Any) -> Plan:
    return default_plan(capture(name, torch.float64), **choices)


def with_own_rows(plan: Plan) -> Plan:
    """A plan whose ranks of tp hold experts whole, and route rows of their own."""
    program = capture("modules-gpt", torch.float64).classes[1].bind(plan.microbatch_size)
    sort = next(op for op in program.ops if op.target == "planner.sort_rows")
    rows = {name: Shard(0) for op in (sort, *grouped_products(program)) for name in op.outputs[:1]}
    layout = propagate_layout(1, program, plan.tp, pins=rows).model_copy(update={"axis": "tp"})
    assert cuts_rows(program, layout)
    others = tuple(each for each in plan.layouts if (each.class_index, each.axis) != (1, "tp"))
    return plan.model_copy(update={"layouts": (*others, layout)})


def test_on_two_ranks() -> None:
    plans = [
        plan_of(dp=2, ep=2, microbatch_size=4),
        plan_of(dp=2, ep=2, recompute="full"),
        plan_of(dp=2, ep=2, recompute="selective"),
        plan_of(cp=2, ep=2),
        with_own_rows(plan_of(tp=2, ep=2, etp=1)),
    ]
    check_plans(2, [("modules-gpt", plan) for plan in plans])


def test_on_four_ranks() -> None:
    """Replicas of experts, beside stages, cut as tp cuts them, on cp, with biases, and under ZeRO:
    shards over the ranks with the same experts, none, and copies of shards.
    """
    check(
        4,
        [
            ("modules-gpt", {"dp": 4, "ep": 4}),
            ("modules-gpt", {"dp": 2, "ep": 2, "pp": 2}),
            ("biased-modules-gpt", {"dp": 2, "tp": 2, "ep": 2}),
            ("modules-gpt", {"dp": 2, "cp": 2, "ep": 2}),
            ("modules-gpt", {"dp": 4, "ep": 2, "zero_stage": 1}),
            ("biased-modules-gpt", {"dp": 4, "ep": 2, "zero_stage": 3}),
            ("modules-gpt", {"dp": 4, "ep": 4, "zero_stage": 3}),
            ("modules-gpt", {"rp": 2, "dp": 2, "ep": 2, "zero_stage": 3, "microbatch_size": 4}),
        ],
    )


def test_the_norm_counts_each_expert_once() -> None:
    plans = [plan_of(dp=4, ep=2), plan_of(dp=2, tp=2, ep=2), plan_of(dp=4, ep=2, zero_stage=1)]
    for of_rank in run_ranks(clip_many, 4, [("modules-gpt", plan) for plan in plans], 0.01):
        for norm, expected, gap in of_rank:
            assert norm == pytest.approx(expected, rel=1e-12)
            assert gap < RTOL


@pytest.mark.parametrize("way", ["of shards", pytest.param("to tp", marks=pytest.mark.slow)])
def test_checkpoints_go_to_other_plans_and_back(way: str, tmp_path) -> None:
    name = "biased-modules-gpt"
    spread = plan_of(name, dp=2, ep=2, microbatch_size=2)
    shards = plan_of(name, dp=4, ep=2, microbatch_size=1, zero_stage=1)
    plain = plan_of(name, tp=2, microbatch_size=4)
    saved, loaded = (spread, plain) if way == "to tp" else (shards, spread)
    check_checkpoints([Case(name, saved, loaded, str(tmp_path))])


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4}, {"dp": 4, "zero_stage": 1}])
def test_a_rank_holds_its_own_experts_alone(sizes: dict[str, int]) -> None:
    graph, plan = capture("modules-gpt", torch.float64), plan_of(ep=2, **sizes)
    held = Holdings(graph, plan)
    names = {meta.fqn for meta in graph.params if ".experts.experts." in meta.fqn}
    by_rank = [
        {each.meta.fqn: each for each in held.of(rank).values() if each.meta.fqn in names}
        for rank in range(plan.world_size)
    ]
    for rank, found in enumerate(by_rank):
        numbers = {int(name.split(".")[4]) for name in found}
        assert numbers == ({0, 1} if rank % 2 == 0 else {2, 3})
    # Each is written once: by the ranks that have it, dealt among them.
    for name in names:
        copies = [found[name] for found in by_rank if name in found]
        assert len(copies) == plan.world_size // 2
        if not plan.zero_stage:
            assert sorted(each.copy or 0 for each in copies) == [*range(len(copies))]


class Tied(ExpertModules):
    """Two experts with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[3][0].weight = self.experts[0][0].weight


class Beside(ExpertModules):
    """A row also passes through the first expert, whichever it chose."""

    def forward(self, x):
        return super().forward(x) + self.experts[0](x)


class Penalised(ExpertModules):
    """Norms of all experts' weights are put together, too."""

    def forward(self, x):
        norms = torch.stack([expert[0].weight.norm() for expert in self.experts])
        return super().forward(x) + norms.sum()


class Stacked(nn.Module):
    """Experts' weights, put together by the model: of every second one turned."""

    def __init__(self) -> None:
        super().__init__()
        import transformers.integrations.moe  # noqa: F401

        self.router = nn.Linear(HIDDEN, 4)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(HIDDEN, HIDDEN)) for _ in range(4))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        experts, order = self.router(rows).argmax(-1).sort(stable=True)
        counts = torch.histc(experts.float(), 4, 0, 3)
        ends = counts.to(torch.int32).cumsum(0, dtype=torch.int32)
        each = [w.t() if at % 2 else w for at, w in enumerate(self.weights)]
        made = torch.ops.transformers.grouped_mm_fallback(rows[order], torch.stack(each), ends)
        return torch.empty_like(made).index_copy(0, order, made).view_as(x)


def graph_with(kind: type[nn.Module]) -> ModelGraph:
    return capture_module(RoutedGPT(kind=kind), gpt_batch(2), gpt_batch(3))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Tied, "are used by several experts, or beside them"),
        (Beside, "are used by several experts, or beside them"),
        (Penalised, "are used by several experts, or beside them"),
        (Stacked, "are not all taken alike"),
    ],
)
def test_experts_that_have_no_rank_of_their_own_are_refused(
    kind: type[nn.Module], why: str
) -> None:
    graph = graph_with(kind)
    assert experts_of(graph) == 1
    with pytest.raises(LayoutError, match=f"like experts.*, {why}, which ep does not"):
        check_experts(graph, Degrees(dp=4, ep=2))


def test_weights_that_lie_differently_are_refused() -> None:
    graph, plan = capture("modules-gpt", torch.float64), plan_of(dp=2, tp=2, ep=2)
    layout = next(each for each in plan.layouts if each.class_index == 1 and each.axis == "tp")
    at = next(
        at
        for at, name in enumerate(graph.classes[1].params)
        if graph.classes[1].tensor[name].fqn.endswith("experts.1.0.weight")
    )
    other = layout.model_copy(
        update={"params": (*layout.params[:at], "R", *layout.params[at + 1 :])}
    )
    layouts = tuple(other if each is layout else each for each in plan.layouts)
    with pytest.raises(LayoutError, match=r"lie as S\(\d\)@tp R@.* and .*; pin those of all"):
        param_placements(graph, plan.model_copy(update={"layouts": layouts}), 0)
