"""Experts on ranks of their own: what a rank runs, what does not divide."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.errors import LayoutError
from planner.language.graph import Program
from planner.language.layout.axes import Degrees
from planner.language.layout.redistribute import DEAL_RUNS, EXCHANGE_ROWS
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import check_experts, spread_experts, spread_params
from planner.language.lowering.lowering import lower
from planner.language.ops.families.products.matmul import GROUPED_MM
from planner.language.plan import load_plan, save_plan
from planner.language.plan.replication import Replication
from planner.language.templates import Experts, Transformer, build_transformer
from planner.language.templates.splits import tp_layouts
from search.space.configuration import Configuration
from tests.captures import capture_module
from tests.opaque_models import WIDTH, Chain, LoopedExperts, batch

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
    fullest, dealt = COPIES * 3 // 2, (2, 4, 2)
    assert shapes(local, DEAL_RUNS) == [((8,), dealt, (2,))]
    assert shapes(local, EXCHANGE_ROWS) == [
        ((COPIES, 64), dealt, (fullest, 64)),
        ((fullest, 64), dealt, (COPIES, 64)),
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
    assert shapes(local, EXCHANGE_ROWS) == [((rows, 64), (2, 4, 2), (rows, 64))] * 2
    first, _ = shapes(local, GROUPED_MM)
    matrices = (2, 64, 32) if cuts_experts else (2, 64, 64)
    assert first[:2] == ((COPIES if cuts_experts else rows, 64), matrices)


@pytest.mark.parametrize(
    ("model", "degrees", "says"),
    [
        (DENSE, Degrees(dp=4, ep=2), "of which the model has none; use ep=1 and etp=1, or "),
        (MODEL, Degrees(dp=4, ep=8), r"ep=8 \* etp=1 does not divide the 4 ranks of a stage"),
        (MODEL, Degrees(dp=4, tp=4, ep=2, etp=2), "etp=2 was given and tp=4; use etp=1 or etp=tp"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(
    model: Transformer, degrees: Degrees, says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        check_experts(build_transformer(model), degrees)


class AllExperts(nn.Module):
    """Every expert on every row, weighted by its score: one product of stacked matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, WIDTH).expand(4, -1, -1)
        shares = self.router(x).softmax(-1).reshape(-1, 4).t().unsqueeze(-1)
        made = torch.bmm(rows, self.up.transpose(1, 2).contiguous())
        return (made * shares).sum(0).view_as(x)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (LoopedExperts, r"none \(LoopedExperts at .* depends on values, and so is called whole\)"),
        (AllExperts, r"none \(all rows meet all matrices of part\.up, which tp divides\)"),
    ],
)
def test_experts_that_are_not_recognised_are_told_apart_from_none(
    part: Callable[[], nn.Module], says: str
) -> None:
    graph = capture_module(Chain(part), batch(2), batch(3))
    with pytest.raises(LayoutError, match=says):
        check_experts(graph, Degrees(dp=4, ep=2))


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"ep=3 does not divide the 8 experts of mlp\.experts"):
        spread_experts(layer(), 3)


def test_its_size_is_in_the_plan_and_adds_no_ranks(tmp_path) -> None:
    graph = build_transformer(MODEL)
    plan = default_plan(graph, dp=4, ep=2)
    assert (plan.world_size, plan.degrees["ep"]) == (4, 2)
    assert dict(plan.degrees) == {"rp": 1, "dp": 4, "cp": 1, "hp": 1, "tp": 1}
    assert plan.degrees.with_sizes(dp=2)["ep"] == 2
    save_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["ep"] == 2
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan != default_plan(graph, dp=4)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 4, "ep": 2}, {"rp": 2, "dp": 4, "ep": 4}])
def test_a_searched_configuration_shares_experts_as_its_plan_does(sizes: dict[str, int]) -> None:
    plan = default_plan(build_transformer(MODEL), zero_stage=1, microbatch_size=8, **sizes)
    searched = Configuration(
        degrees=plan.degrees, pp=1, vpp=1, microbatch_size=1, num_microbatches=1, schedule="1f1b",
        zero=1, recompute="none",
    )  # fmt: skip
    assert searched.replication == Replication.of(plan, 0)
