"""Tokens of all ranks of ep gathered on each, which sums what its own experts make of them: as one
process trains, in fp64, with matrices of all experts and with experts of modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.errors import LayoutError
from planner.language.graph import Op, Ref
from planner.language.layout.redistribute import EXCHANGE_ROWS, GATHER_ROWS, SCATTER_ROWS
from planner.language.lowering.experts import gathered_layout, spread_experts
from planner.language.lowering.lowering import local_program
from planner.language.plan import Plan, load_plan, save_plan
from tests.runtime.scenarios import RTOL, capture, check_plans
from tests.runtime.test_expert_modules import plan_of, with_own_rows
from tests.runtime.test_experts import train_with_tails
from tests.spawn import run_ranks


def gathering(name: str, plan: Plan | None = None, **choices: Any) -> tuple[str, Plan]:
    """A plan whose blocks gather tokens, with the model's name."""
    plan = plan or plan_of(name, **choices)
    classes = enumerate(capture(name, torch.float64).classes)
    found = (gathered_layout(program, index) for index, program in classes)
    layouts = tuple(layout for layout in found if layout is not None)
    assert layouts
    return name, plan.model_copy(update={"layouts": (*plan.layouts, *layouts)})


def targets(name: str, plan: Plan) -> Iterator[str]:
    graph = capture(name, torch.float64)
    for index in range(len(graph.classes)):
        program = local_program(graph, plan, index, degrees=plan.degrees, microbatch_size=1)
        yield from (op.target for op in program.ops)


def test_on_two_ranks() -> None:
    cases = [
        gathering("routed-gpt", dp=2, ep=2, microbatch_size=4),
        gathering("modules-gpt", dp=2, ep=2, recompute="full"),
        gathering("biased-routed-gpt", dp=2, ep=2, recompute="selective", num_microbatches=1),
        gathering("modules-gpt", cp=2, ep=2),
        gathering("modules-gpt", with_own_rows(plan_of(tp=2, ep=2, etp=1))),
    ]
    for name, plan in cases:
        found = [*targets(name, plan)]
        assert GATHER_ROWS in found
        assert SCATTER_ROWS in found
        assert EXCHANGE_ROWS not in found
    check_plans(2, cases)


@pytest.mark.slow
def test_on_four_ranks() -> None:
    check_plans(
        4,
        [
            gathering("modules-gpt", dp=2, ep=2, pp=2),
            gathering("biased-modules-gpt", dp=2, tp=2, ep=2),
            gathering("biased-routed-gpt", dp=2, cp=2, ep=4),
            gathering("modules-gpt", dp=4, ep=2, zero_stage=1),
            gathering("biased-routed-gpt", dp=4, ep=2, zero_stage=3),
        ],
    )


def test_ranks_with_fewer_tokens_fill_theirs_up() -> None:
    """Of 7 samples a rank has 4 and another 3; of an evaluation some have none."""
    name, plan = gathering("modules-gpt", dp=2, ep=2, microbatch_size=4, num_microbatches=2)
    gaps, loss, expected = run_ranks(train_with_tails, 2, plan, [8, 7, 5], name)[0]
    assert gaps.largest < RTOL
    assert loss == pytest.approx(expected, rel=1e-12)


def test_a_plan_keeps_which_form_it_has(tmp_path) -> None:
    name, plan = gathering("routed-gpt", dp=2, ep=2)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert GATHER_ROWS in [*targets(name, load_plan(tmp_path / "plan.json"))]


def test_rows_that_are_used_beside_experts_are_not_gathered() -> None:
    program = capture("modules-gpt", torch.float64).classes[1].bind(2)
    layout = gathered_layout(program, 1)
    spread_experts(program, 2, layout=layout)
    sort = next(op for op in program.ops if op.target == "planner.sort_rows")
    copies = program.tensor[sort.outputs[0]]
    looks = Op(
        name="looks", target="aten.neg.default", args=(Ref(copies.name),), outputs=("looks",)
    )
    looked = replace(
        program,
        ops=(*program.ops, looks),
        tensors=(*program.tensors, replace(copies, name="looks")),
    )
    with pytest.raises(LayoutError, match="are not sorted for them, or are used beside them"):
        spread_experts(looked, 2, layout=layout)
