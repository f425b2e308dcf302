"""Mixtures of experts on ranks that each sort rows of their own: as one process, in fp64."""

from __future__ import annotations

import pytest

from planner.capture import capture_source
from planner.language.graph import from_json, to_json
from planner.language.layout.placement import Own, Shard, parse_placement
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.propagate import propagate_graph, propagate_layout
from planner.language.ops.families.entries.routing import SORT_ROWS
from planner.runtime.proofs.verify import compare_with_one_process
from tests.model_matrix import model_matrix
from tests.runtime.test_verify_matrix import source_of
from tests.spawn import run_ranks

SAMPLES = 2
WITHIN = 1e-9
BY_ROWS = "tp2, rows cut"
LAYOUTS = {
    "tp2": {"tp": 2},
    BY_ROWS: {"tp": 2},
    f"{BY_ROWS}, recomputed": {"tp": 2, "recompute": "selective"},
    "cp2": {"cp": 2},
    "cp2, recomputed": {"cp": 2, "recompute": "full"},
    "cp2 zb_h1 pp1": {"cp": 2, "schedule": "zb_h1", "num_microbatches": 2},
}
FOUR = {
    "tp2 cp2": {"tp": 2, "cp": 2},
    "dp2 cp2 zero3": {"dp": 2, "cp": 2, "zero_stage": 3},
    "pp2 cp2": {"pp": 2, "cp": 2, "schedule": "zb_h1"},
}


def by_rows(graph, plan):
    """Whole matrices on tp, and on each rank rows of its own: the plan's layouts, but so."""
    layouts = propagate_graph(graph, microbatch_size=SAMPLES, axis_size=2, boundary=Shard(1))
    found = []
    for layout in layouts:
        program = graph.classes[layout.class_index].bind(SAMPLES)
        sorts = [op for op in program.ops if op.target == SORT_ROWS]
        made = propagate_layout(
            layout.class_index,
            program,
            2,
            pins={op.outputs[1]: Own(0, SAMPLES) for op in sorts},
            at_rest={
                name: parse_placement(text)
                for name, text in zip(program.params, layout.params, strict=True)
                if not sorts
            },
            inputs=[*map(parse_placement, layout.inputs)],
            outputs=[*map(parse_placement, layout.outputs)],
        )
        found.append(made)
        assert all(made.op_shardings[op.name].outputs[0] == Shard(0, SAMPLES) for op in sorts)
    return plan.model_copy(update={"layouts": tuple(found)})


def trained(name, captured, layouts):
    """On each rank: the largest difference from one process under each layout, on rank 0."""
    graph, apart = from_json(captured), {}
    for label, layout in layouts.items():
        plan = default_plan(graph, microbatch_size=SAMPLES, **layout)
        plan = by_rows(graph, plan) if BY_ROWS in label else plan
        if "cp" in layout:
            sorts = [text for each in plan.layouts for op, text in each.ops if "unsort" in op]
            assert any(",O(0)" in text for text in sorts), "rows are not cut"
        report = compare_with_one_process(plan, source_of(name), steps=2, graph=graph)
        if report is not None:
            apart[label] = report
    return {label: str(r) for label, r in apart.items() if not r.passed}


def check(name, num_ranks, layouts):
    pytest.importorskip("transformers")
    captured = to_json(capture_source(source_of(name)))
    found = run_ranks(trained, num_ranks, name, captured, layouts)[0]
    assert not found, f"apart by more than rounding: {found}"


@pytest.mark.parametrize("name", ["hf-mixtral", pytest.param("hf-gpt-oss", marks=pytest.mark.slow)])
def test_rows_of_each_ranks_own(name):
    """Matrices of experts are whole where rows are cut: their gradient is a sum over the ranks."""
    assert name in model_matrix()
    check(name, 2, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-mixtral", "hf-gpt-oss", "hf-deepseek-v3"])
def test_rows_of_each_ranks_own_on_four(name):
    check(name, 4, FOUR)
