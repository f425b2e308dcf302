"""N7, B9: Experts on ranks of their own train as one process: rows go to them and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.errors import LayoutError
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import cuts_rows, grouped_products
from planner.language.lowering.holdings import Holdings
from planner.language.lowering.lowering import local_program
from planner.language.lowering.propagate import propagate_layout
from planner.language.plan import Plan
from tests.runtime.beside import Gaps, OneProcess, adamw, train_beside
from tests.runtime.checkpoint.scenarios import Case
from tests.runtime.checkpoint.test_round_trips import check as check_checkpoints
from tests.runtime.scenarios import RTOL, build, capture, check, check_plans, clip_many
from tests.spawn import run_ranks


def plan_of(name: str = "routed-gpt", **choices: Any) -> Plan:
    return default_plan(capture(name, torch.float64), **choices)


def test_on_two_ranks() -> None:
    check(
        2,
        [
            ("routed-gpt", {"dp": 2, "ep": 2, "microbatch_size": 4}),
            ("routed-gpt", {"dp": 2, "ep": 2, "recompute": "full"}),
            ("routed-gpt", {"dp": 2, "ep": 2, "recompute": "selective"}),
        ],
    )


def test_on_four_ranks() -> None:
    """Replicas of experts, one for each rank, beside stages, cut as tp cuts them, with rows that
    are cut over cp, and with biases."""
    check(
        4,
        [
            ("routed-gpt", {"dp": 4, "ep": 2}),
            ("routed-gpt", {"dp": 4, "ep": 4}),
            ("routed-gpt", {"dp": 2, "ep": 2, "pp": 2}),
            ("routed-gpt", {"dp": 2, "tp": 2, "ep": 2}),
            ("routed-gpt", {"dp": 2, "cp": 2, "ep": 4}),
            ("biased-routed-gpt", {"dp": 2, "cp": 2, "ep": 2}),
            ("biased-routed-gpt", {"dp": 2, "tp": 2, "ep": 2}),
        ],
    )


def test_zero_shards_experts_over_their_own_replicas() -> None:
    """ZeRO 1, 2 and 3, HSDP, beside tp, and where each rank has other experts."""
    check(
        4,
        [
            ("routed-gpt", {"dp": 4, "ep": 2, "zero_stage": 1}),
            ("routed-gpt", {"dp": 4, "ep": 2, "zero_stage": 2}),
            ("biased-routed-gpt", {"dp": 4, "ep": 2, "zero_stage": 3}),
            ("routed-gpt", {"dp": 4, "ep": 4, "zero_stage": 3}),
            ("routed-gpt", {"dp": 2, "tp": 2, "ep": 2, "zero_stage": 1}),
            ("routed-gpt", {"rp": 2, "dp": 2, "ep": 2, "zero_stage": 3, "microbatch_size": 4}),
        ],
    )


def with_own_rows(plan: Plan, name: str = "routed-gpt") -> Plan:
    """A plan whose ranks of tp hold experts whole, and route rows of their own."""
    program = capture(name, torch.float64).classes[1].bind(plan.microbatch_size)
    rows = {"sort_rows.0": Shard(0)} | {op.outputs[0]: Shard(0) for op in grouped_products(program)}
    layout = propagate_layout(1, program, plan.tp, pins=rows).model_copy(update={"axis": "tp"})
    assert cuts_rows(program, layout)
    others = tuple(each for each in plan.layouts if (each.class_index, each.axis) != (1, "tp"))
    return plan.model_copy(update={"layouts": (*others, layout)})


def test_ranks_of_tp_with_rows_of_their_own() -> None:
    """Each has whole matrices of its own experts; nothing is summed over tp inside the block."""
    plans = [plan_of(dp=2, tp=2, ep=4, etp=1), plan_of(dp=2, tp=2, ep=2, etp=1)]
    check_plans(4, [("routed-gpt", with_own_rows(plan)) for plan in plans])


def test_the_norm_counts_each_expert_once() -> None:
    plans = [plan_of(dp=4, ep=2), plan_of(dp=2, tp=2, ep=2)]
    cases = [("routed-gpt", plan) for plan in plans]
    for of_rank in run_ranks(clip_many, 4, cases, 0.01):
        for norm, expected, gap in of_rank:
            assert norm == pytest.approx(expected, rel=1e-12)
            assert gap < RTOL


def train_with_tails(
    plan: Plan, sizes: list[int], name: str = "routed-gpt"
) -> tuple[Gaps, float, float]:
    torch.set_default_dtype(torch.float64)
    tiny, module = build(name)
    alone = OneProcess(module, adamw, loss=tiny.loss)
    engine = planner.apply(plan, module, optimizer=adamw(module))
    gaps = train_beside(engine, alone, [tiny.batch(size) for size in sizes])
    batch = tiny.batch(5)
    with torch.no_grad():
        expected = loss_of(call_with_batch(alone.module, batch), batch, tiny.loss).item()
    return gaps, float(engine.evaluate(batch)), expected


def test_uneven_batches_and_evaluation() -> None:
    plan = plan_of(dp=2, ep=2, microbatch_size=4, num_microbatches=2)
    gaps, loss, expected = run_ranks(train_with_tails, 2, plan, [8, 7, 5])[0]
    assert gaps.largest < RTOL
    assert loss == pytest.approx(expected, rel=1e-12)


def test_checkpoints_go_to_other_plans_and_back(tmp_path) -> None:
    spread = plan_of(dp=2, ep=2, microbatch_size=2)
    wide = plan_of(dp=2, tp=2, ep=2, microbatch_size=2)
    plain = plan_of(tp=2, microbatch_size=4)
    check_checkpoints(
        [
            Case("routed-gpt", spread, plain, str(tmp_path / "to")),
            Case("routed-gpt", wide, spread, str(tmp_path / "from")),
        ]
    )


def test_a_rank_holds_its_own_experts_alone() -> None:
    """Of [experts, in, out] a part of the first dim, and of tp's layout the last."""
    graph = capture("routed-gpt", torch.float64)
    plan = plan_of(dp=2, tp=2, ep=2)
    held = Holdings(graph, plan)
    spans = [
        {h.meta.fqn: h.piece.span for h in held.of(rank).values()}["layers.0.experts.down"]
        for rank in range(4)
    ]
    assert [span[0] for span in spans] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert spans[0][1:] != spans[1][1:]


def test_rows_that_ranks_have_alike_are_refused() -> None:
    """Each rank of one group of experts sends rows of its own: else they would count twice."""
    graph = capture("routed-gpt", torch.float64)
    plan = plan_of(dp=2, tp=2, ep=2, etp=1)
    with pytest.raises(LayoutError, match=r"have the same rows of experts; use etp=2"):
        local_program(graph, plan, 1, degrees=plan.degrees, microbatch_size=1)
    plan = plan_of(dp=2, tp=2, ep=2)
    assert plan.degrees["etp"] == 2
    local_program(graph, plan, 1, degrees=plan.degrees, microbatch_size=1)
