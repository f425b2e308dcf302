"""X6: what differs between two plans, exactly as a patch, and in parts."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.plan.diff import (
    blocks,
    compared,
    decisions,
    layouts,
    parameters,
    patch,
    patched,
)
from tests.captures import capture_tiny

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp2 balanced otherwise": {"pp": 2, "num_microbatches": 4, "balance": (1, -1)},
    "pp2 vpp2": {"pp": 2, "vpp": 2, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
    "tp2 dp2": {"tp": 2, "dp": 2, "zero_stage": 3},
    "own meshes": {"pp": 2, "tp": 2, "by_stage": {"tp": (2, 1)}, "microbatch_size": 2},
    "recompute": {"pp": 2, "num_microbatches": 4, "recompute": "full"},
}


def plan_of(name: str, **changes: Any) -> Plan:
    graph = capture_tiny("gpt")
    layout = dict(LAYOUTS[name])
    if "balance" in layout:
        layout["balance"] = (1, len(graph.blocks) - 1)
    estimate = {
        "step_s": 1.0 + len(name), "peak_bytes": 100 * len(name), "source": "analytic",
        "time": {"compute_s": 1.0, "bubble_s": float(len(name))}, "memory": [{"parameters": 1.0}],
    }  # fmt: skip
    return default_plan(graph, **layout).model_copy(update={"estimate": estimate, **changes})


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_does_not_differ_from_itself(name):
    plan, again = plan_of(name), plan_of(name)
    assert patch(plan, again) == []
    assert compared(plan, again, capture_tiny("gpt")).is_empty


def test_the_patch_from_a_to_b_makes_b_of_a():
    plans = [plan_of(name) for name in LAYOUTS]
    for before, after in permutations(plans, 2):
        made = patch(before, after)
        assert made
        assert patched(before, made) == after
        assert not compared(before, after).is_empty


def test_a_patch_of_another_plan_is_refused():
    made = patch(plan_of("own meshes"), plan_of("pp2 vpp2"))
    with pytest.raises(PlanError, match="give the plan it was made from"):
        patched(plan_of("tp2 dp2"), made)
    broken = [{"op": "replace", "path": "/pp", "value": 3}]
    with pytest.raises(PlanError, match="does not fit this plan"):
        patched(plan_of("pp2"), broken)


def test_decisions_are_told_by_name():
    found = decisions(plan_of("pp2"), plan_of("pp2 vpp2"))
    assert [(each.name, each.before, each.after) for each in found] == [
        ("vpp", "1", "2"),
        ("schedule", "1f1b", "interleaved_1f1b"),
    ]


def test_runs_of_blocks_are_told_with_what_changes_alone():
    count = len(capture_tiny("gpt").blocks)
    first = plan_of("pp2").stages[0].last_block
    (moved,) = blocks(plan_of("pp2"), plan_of("pp2 balanced otherwise"))
    assert moved.name == (f"blocks 1..{first}" if first > 1 else "block 1")
    assert (moved.before, moved.after) == ("pp rank 0, stage 0", "pp rank 1, stage 1")
    (recomputed,) = blocks(plan_of("pp2"), plan_of("recompute"))  # over both stages
    assert recomputed.name == f"blocks 0..{count - 1}"
    assert (recomputed.before, recomputed.after) == ("recompute none", "recompute full")


def test_layouts_and_parameters_that_others_hold():
    graph = capture_tiny("gpt")
    before, after = plan_of("pp2"), plan_of("tp2 dp2")
    assert all("on tp 2" in each.name for each in layouts(before, after))
    assert {each.before for each in layouts(before, after)} == {"replicated"}
    moved = parameters(before, after, graph)
    names = [name for each in moved for name in each.names]
    trained = [t.fqn for t in graph.tensors if t.kind == "param"]
    assert sorted(names) == sorted(trained)  # each is once, and all move: pp 2 to pp 1 in shards
    assert sum(each.num_bytes for each in moved) == sum(
        t.bytes_at(1) for t in graph.tensors if t.kind == "param"
    )
    assert all(each.after.endswith("in 2 shards") for each in moved)
    assert any("S(0) on tp 2" in each.after for each in moved)
    # Blocks that move take their parameters along, and nothing else moves.
    few = parameters(before, plan_of("pp2 balanced otherwise"), graph)
    moving = {graph.tensor[name].fqn for b in graph.blocks[1 : before.stages[0].last_block + 1]
              for name in b.params if graph.tensor[name].kind == "param"}  # fmt: skip
    assert {name for each in few for name in each.names} == moving


def test_costs_are_told_where_they_differ():
    costs = {c.name: c for c in compared(plan_of("pp2"), plan_of("tp2 dp2")).costs}
    assert costs.keys() == {"step_s", "bubble_s", "peak_bytes"}
    assert (costs["step_s"].before, costs["step_s"].after) == (4.0, 8.0)
    assert costs["peak_bytes"].unit == "bytes"
    without = plan_of("pp2", estimate={})
    assert compared(without, plan_of("tp2 dp2")).costs == ()


def test_plans_of_different_models_are_refused():
    other = default_plan(capture_tiny("mlp"))
    with pytest.raises(PlanError, match="the plans are for different models"):
        compared(plan_of("pp2"), other)
