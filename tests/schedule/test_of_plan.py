"""A plan's table: by name, or its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanError, ScheduleError
from planner.language.graph import Block, ModelGraph, Program
from planner.language.lowering.match_model import validate_model
from planner.language.plan import ClusterRef, ModelRef, Plan, StagePlan, load_plan, save_plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import build_schedule


def make_plan(schedule: str, pp_ranks: tuple[int, ...], table: tuple[str, ...] = ()) -> Plan:
    return Plan(
        model=ModelRef(
            name="m", file="m.py", fingerprint="0" * 64, inputs=(), batch_tree={"tuple": []}
        ),
        cluster=ClusterRef(name="c", device="cpu", devices_per_node=1),
        dp=1,
        tp=1,
        pp=max(pp_ranks) + 1,
        vpp=len(pp_ranks) // (max(pp_ranks) + 1),
        microbatch_size=1,
        num_microbatches=4,
        schedule=schedule,
        table=table,
        zero_stage=0,
        stages=tuple(
            StagePlan(pp_rank=rank, first_block=i, last_block=i) for i, rank in enumerate(pp_ranks)
        ),
        layouts=(),
    )


def test_named_schedule() -> None:
    """D17: schedule and vpp are in the plan."""
    expected = build_schedule("zb_v", pp=2, vpp=2, num_microbatches=4)
    assert schedule_of(make_plan("zb_v", (0, 1, 1, 0))) == expected


def test_another_placement_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"on pp ranks \[0, 1, 0, 1\], but schedule 'zb_v'"):
        schedule_of(make_plan("zb_v", (0, 1, 0, 1)))


def test_own_table_survives_the_file(tmp_path: Path) -> None:
    """P13: the job list is in the plan and comes back as it was."""
    table = build_schedule("eager_1f1b", pp=2, vpp=1, num_microbatches=4).to_json()["jobs"]
    plan = make_plan("synthesised", (0, 1), tuple(table))
    save_plan(plan, tmp_path / "plan.json")
    schedule = schedule_of(load_plan(tmp_path / "plan.json"))
    assert [" ".join(map(str, row)) for row in schedule.jobs] == table


def test_own_table_is_checked() -> None:
    """X9: a damaged table does not run."""
    with pytest.raises(ScheduleError, match=r"no B or I of stage 1, microbatch 3"):
        schedule_of(
            make_plan(
                "synthesised",
                (0, 1),
                ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2"),
            )
        )


def test_every_block_is_in_exactly_one_stage() -> None:
    """X9: stages that leave a block out, or hold one twice, are refused."""
    empty = Program(name="p", inputs=(), params=(), outputs=(), tensors=(), ops=())
    blocks = tuple(
        Block(index=i, name=f"b{i}", class_index=0, inputs=(), params=(), outputs=())
        for i in range(3)
    )
    graph = ModelGraph(
        name="m",
        tensors=(),
        batch_inputs=(),
        batch_tree=None,
        preamble=empty,
        blocks=blocks,
        classes=(empty,),
        loss="loss",
    )
    plan = make_plan("1f1b", (0, 1))
    plan = plan.model_copy(
        update={"model": plan.model.model_copy(update={"fingerprint": graph.fingerprint})}
    )
    with pytest.raises(PlanError, match=r"hold blocks 0\.\.1 and the model has 3 blocks"):
        validate_model(plan, graph)
    data = plan.model_dump()
    data["stages"][1]["first_block"] = 0
    with pytest.raises(ValueError, match="stages must cover every block once, in order"):
        Plan.model_validate(data)
