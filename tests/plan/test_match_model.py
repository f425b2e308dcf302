"""Whether a plan is for a model."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.match_model import validate_model
from planner.language.plan import ClassRecompute
from planner.language.plan.parts import batch_spec
from tests.captures import capture_tiny


@pytest.fixture(scope="module")
def graph():
    return capture_tiny("mlp")


def test_the_plan_of_a_model_is_for_it(graph):
    plan = default_plan(graph, tp=2)
    validate_model(plan, graph)
    assert batch_spec(graph) == (
        ("0", "float32", ((1, 0), 8)),
        ("1", "float32", ((1, 0), 4)),
    )


def test_each_mismatch_is_told(graph):
    plan = default_plan(graph, tp=2)
    layout = plan.layouts[0]
    stage = plan.stages[0]
    for change, says in (
        ({"model": plan.model.model_copy(update={"fingerprint": "0" * 64})}, "search again for"),
        ({"model": plan.model.model_copy(update={"inputs": ()})}, "inputs are not those"),
        ({"stages": (stage.model_copy(update={"last_block": 7}),)}, "hold blocks 0..7"),
        ({"layouts": (layout.model_copy(update={"class_index": 9}),)}, "names block class 9"),
        ({"layouts": (layout.model_copy(update={"inputs": ()}),)}, "places 0 inputs"),
        ({"recomputed": (ClassRecompute(class_index=9, ops=()),)}, "names block class 9"),
    ):
        with pytest.raises(PlanError, match=says):
            validate_model(plan.model_copy(update=change), graph)


def test_a_layout_names_ops_of_its_class(graph):
    plan = default_plan(graph, tp=2)
    layout = plan.layouts[0]
    (name, text), *rest = layout.ops
    for ops in ((("nobody", text), *rest), ((name, f"{text},R"), *rest)):
        changed = layout.model_copy(update={"ops": ops})
        with pytest.raises(PlanError, match="has no such op"):
            validate_model(plan.model_copy(update={"layouts": (changed,)}), graph)
