"""Our tables against those torch.distributed.pipelining builds, where both have the schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from planner.language.schedule import Schedule, build_schedule

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_rows(class_name: str, ours: Schedule) -> list[str]:
    """The table torch makes, in our words; pairs that overlap count as F then B."""
    stages = [
        SimpleNamespace(
            group_size=ours.pp,
            group_rank=0,
            num_stages=ours.num_stages,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == ours.num_stages - 1,
            has_backward=False,
            device="cpu",
            submod=None,
        )
        for stage in ours.stages_of(0)
    ]
    theirs = getattr(schedules, class_name)(stages, ours.num_microbatches, loss_fn=lambda *_: None)
    rows = []
    for rank in range(ours.pp):
        row = []
        for action in theirs.pipeline_order[rank]:
            for part in () if action is None else (action.sub_actions or (action,)):
                kind = LETTERS[part.computation_type.name]
                row.append(f"{part.stage_index}{kind}{part.microbatch_index}")
        rows.append(" ".join(row))
    return rows


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "class_name", "vpp"),
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 2),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 3),
        ("zb_v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe_v", "ScheduleDualPipeV", 2),
    ],
)
def test_same_table_as_torch(name: str, class_name: str, vpp: int, pp: int) -> None:
    """P17, V6: an independent program of the same paper yields the same jobs in the same order."""
    for m in (2 * pp, 4 * pp):
        ours = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
        assert [" ".join(map(str, row)) for row in ours.jobs] == torch_rows(class_name, ours)


def test_breadth_first_differs_in_the_order_of_backwards_only() -> None:
    """V10: torch runs the backwards of a chunk newest first; we keep microbatch order.

    Gradients then add up in the same order under every schedule.
    """
    ours = build_schedule("looped_breadth_first", pp=2, vpp=2, num_microbatches=3)
    theirs = torch_rows("ScheduleLoopedBFS", ours)
    rows = [" ".join(map(str, row)) for row in ours.jobs]
    assert theirs[0] == "0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0"
    assert rows[0] == "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2"
