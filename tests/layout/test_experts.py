"""Experts on ranks of their own: what a rank runs, what does not divide, what is not run yet."""

import json

import pytest
import torch

from planner.errors import LayoutError, PlanError
from planner.language.graph import Program
from planner.language.layout.axes import Degrees
from planner.language.layout.redistribute import EXCHANGE_ROWS
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import check_experts, spread_experts, spread_params
from planner.language.lowering.lowering import lower
from planner.language.ops.families.products.matmul import GROUPED_MM
from planner.language.plan import load_plan, save_plan
from planner.language.templates import Experts, Transformer, build_transformer
from planner.language.templates.splits import tp_layouts
from planner.runtime.process.groups.mesh import build_mesh

MODEL = Transformer(
    layers=2, hidden=64, heads=4, kv_heads=4, ffn_hidden=128, vocab=128, seq_len=16,
    experts=Experts(number=8, per_token=2, width=32, shared=1),
)  # fmt: skip
DENSE = Transformer(layers=1, hidden=64, heads=4, kv_heads=4, ffn_hidden=128, vocab=128, seq_len=16)
SAMPLES = 2
COPIES = SAMPLES * 16 * 2
"""Rows of experts: samples, tokens, experts of a token."""


def layer(*, tp: int = 1, cuts_experts: bool = True) -> Program:
    program = build_transformer(MODEL).classes[1].bind(SAMPLES)
    layout = tp_layouts(
        MODEL, sequence_parallel=True, microbatch_size=SAMPLES, cuts_experts=cuts_experts
    )[1]
    return lower(program, layout, axis="tp", axis_size=tp)


def shapes(program: Program, target: str) -> list[tuple[tuple[int, ...], ...]]:
    return [
        tuple(program.tensor[n].shape_at(1) for n in (*op.inputs, *op.outputs))
        for op in program.ops
        if op.target == target
    ]


def test_rows_go_to_the_ranks_of_their_experts_and_come_back() -> None:
    whole = layer()
    local = spread_experts(whole, 4, fullest=1.5)
    assert shapes(whole, EXCHANGE_ROWS) == []
    fullest = COPIES * 3 // 2
    assert shapes(local, EXCHANGE_ROWS) == [
        ((COPIES, 64), (fullest, 64)),
        ((fullest, 64), (COPIES, 64)),
    ]
    first, second = shapes(local, GROUPED_MM)
    assert first[:2] == ((fullest, 64), (2, 64, 64))
    assert second[:2] == ((fullest, 32), (2, 32, 64))
    # Shared experts, the router and attention are as they were.
    assert shapes(local, "aten.linear.default") == shapes(whole, "aten.linear.default")
    assert {local.tensor[name].fqn for name in spread_params(local)} == {
        "mlp.experts.fc1",
        "mlp.experts.fc2",
    }


def test_a_block_without_experts_is_left_as_it_is() -> None:
    program = build_transformer(MODEL).classes[0].bind(SAMPLES)
    assert spread_experts(program, 4) is program


@pytest.mark.parametrize("cuts_experts", [True, False])
def test_tp_ranks_send_rows_of_their_own(cuts_experts: bool) -> None:
    """A part of every expert: rows are gathered over tp after they came. Whole ones: never."""
    local = spread_experts(layer(tp=2, cuts_experts=cuts_experts), 4)
    rows = COPIES // 2
    assert shapes(local, EXCHANGE_ROWS) == [((rows, 64), (rows, 64))] * 2
    first, _ = shapes(local, GROUPED_MM)
    matrices = (2, 64, 32) if cuts_experts else (2, 64, 64)
    assert first[:2] == ((COPIES if cuts_experts else rows, 64), matrices)


@pytest.mark.parametrize(
    ("model", "degrees", "says"),
    [
        (DENSE, Degrees(dp=4, ep=2), "the model has no experts; use ep=1"),
        (MODEL, Degrees(dp=4, ep=8), r"ep=8 \* etp=1 does not divide the 4 ranks of a stage"),
        (MODEL, Degrees(dp=4, tp=4, ep=2, etp=2), "etp=2 was given and tp=4; use etp=1 or etp=tp"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(
    model: Transformer, degrees: Degrees, says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        check_experts(build_transformer(model), degrees)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"ep=3 does not divide the 8 experts of mlp\.experts"):
        spread_experts(layer(), 3)


def test_its_size_is_in_the_plan_and_adds_no_ranks(tmp_path) -> None:
    graph = build_transformer(MODEL)
    plan = default_plan(graph, dp=4, ep=2)
    assert (plan.world_size, plan.degrees["ep"]) == (4, 2)
    assert dict(plan.degrees) == {"rp": 1, "dp": 4, "cp": 1, "tp": 1}
    assert plan.degrees.with_sizes(dp=2)["ep"] == 2
    save_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["ep"] == 2
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan != default_plan(graph, dp=4)


def test_a_plan_with_it_is_not_run_yet() -> None:
    plan = default_plan(build_transformer(MODEL), dp=4, ep=2)
    with pytest.raises(
        PlanError, match="ep=2, which is priced and not run yet; make one with ep=1"
    ):
        build_mesh(plan, torch.device("cpu"))
