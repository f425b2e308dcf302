"""Loops over experts that are told in sorted runs of rows train as one process does, in fp64.

No row chooses the last expert. Where a loop passes over it, its parameters have no gradient in one
process, and an optimizer with decay leaves them alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import cuts_rows, grouped_products
from planner.language.lowering.propagate import propagate_layout
from planner.language.plan import Plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.capture.loops.looping import LOOPS, Looping, batch_of, captured, with_ties
from tests.spawn import run_ranks

TWO: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2, rows cut": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "cp2 full": {"cp": 2, "recompute": "full"},
    "tp2 selective": {"tp": 2, "recompute": "selective"},
}
EP: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2 full": {"dp": 2, "ep": 2, "recompute": "full"},
}


def build(name: str) -> Looping:
    torch.manual_seed(0)
    name, _, tied = name.partition(" tied ")
    return with_ties(Looping(LOOPS[name]), tied)


def batch(size: int) -> dict[str, torch.Tensor]:
    return batch_of(size, torch.float32)


def source_of(name: str) -> ModelSource:
    return ModelSource(
        path=Path("loop.py"), build=partial(build, name), batch=batch, loss=None, dependencies=()
    )


def graph_of(name: str) -> ModelGraph:
    return captured(build(name), batch)


def with_own_rows(graph: ModelGraph, plan: Plan) -> Plan:
    """The plan, in whose blocks ranks of tp have experts whole, and rows of their own."""
    layouts = []
    for layout in plan.layouts:
        program = graph.classes[layout.class_index].bind(plan.microbatch_size)
        rows = {op.outputs[0]: Shard(0) for op in grouped_products(program)}
        if rows:
            sort = next(op for op in program.ops if op.target == "planner.sort_rows")
            pins = rows | {sort.outputs[0]: Shard(0)}
            layout = propagate_layout(layout.class_index, program, plan.tp, pins=pins)
            layout = layout.model_copy(update={"axis": "tp"})
            assert cuts_rows(program, layout)
        layouts.append(layout)
    return plan.model_copy(update={"layouts": tuple(layouts)})


def verified(name: str, graph: Any, plans: dict[str, Plan]) -> dict[str, VerifyReport | None]:
    captured = from_json(graph)
    return {
        label: compare_with_one_process(plan, source_of(name), steps=2, graph=captured)
        for label, plan in plans.items()
    }


def check(name: str, layouts: dict[str, dict[str, Any]], num_ranks: int = 2) -> None:
    graph = graph_of(name)
    plans = {
        label: default_plan(graph, **{"microbatch_size": 2, "num_microbatches": 2} | how)
        for label, how in layouts.items()
    }
    plans = {
        label: with_own_rows(graph, plan) if "rows" in label else plan
        for label, plan in plans.items()
    }
    for label, report in run_ranks(verified, num_ranks, name, to_json(graph), plans)[0].items():
        assert report.passed, f"{name}, {label}: {report}"


def test_modules_of_experts_that_are_passed_over() -> None:
    check("of_qwen2_moe", TWO)


@pytest.mark.parametrize("what", ["expert", "layer"])
def test_a_part_in_two_places(what) -> None:
    layouts = {name: TWO[name] for name in ("pp2", "cp2", "dp2 zero3")}
    check(f"of_mixtral tied {what}", layouts)


@pytest.mark.slow
def test_a_layer_in_two_places_with_experts_on_ranks_of_their_own() -> None:
    """Ranks at one place of both stages have the same experts, and sum their gradients."""
    layouts: dict[str, dict[str, Any]] = {
        "dp4 ep2": {"dp": 4, "ep": 2},
        "pp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
        "ep2 zero3": {"dp": 4, "ep": 2, "zero_stage": 3},
    }
    check("of_mixtral tied layer", layouts, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "of_qwen2_moe"])
def test_loops_of_other_forms(name) -> None:
    check(name, TWO | EP)


def test_experts_of_one_parameter_lie_on_ranks_of_their_own() -> None:
    check("of_stacks", EP)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_qwen2_moe", "of_stacks", "of_deepseek_v2"])
def test_on_four_ranks(name) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "dp2 tp2": {"dp": 2, "tp": 2},
        "dp2 tp2, rows cut": {"dp": 2, "tp": 2},
        "pp2 cp2": {"pp": 2, "cp": 2},
        "dp4 zero1": {"dp": 4, "zero_stage": 1},
    }
    layouts |= {
        "dp2 tp2 ep2": {"dp": 2, "tp": 2, "ep": 2},
        "pp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
    }
    check(name, layouts, 4)
