"""The jobs of a whole step: roles, what stands behind a table, which job runs which captured op.

P11: every captured op lands in exactly one job kind, and the count is conserved.
"""

from __future__ import annotations

from collections import Counter

import pytest

from planner.emit.targets.torchtitan import schedule_csv
from planner.errors import ScheduleError
from planner.language.lowering.captured_ops import PREAMBLE, work_of_jobs
from planner.language.lowering.defaults import default_plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Job, JobKind, Schedule, build_schedule
from planner.language.schedule.draw import draw_schedule
from planner.language.schedule.step_jobs import (
    ROLES,
    Role,
    StepJobKind,
    find_role,
    jobs_of_role,
    jobs_of_step,
    step_jobs,
)
from tests.captures import capture_tiny


def test_every_job_of_a_step_has_one_role():
    assert set(ROLES) == {*JobKind, *StepJobKind}
    schedule = build_schedule("zb_h1", pp=2, vpp=1, num_microbatches=4)
    by_role = {role: list(jobs_of_role(schedule, role)) for role in Role}
    assert {role: len(jobs) for role, jobs in by_role.items()} == {
        Role.FORWARD: 8, Role.BACKWARD: 16, Role.OPTIMIZER: 2, Role.LEARNING_RATE: 2,
    }  # fmt: skip
    assert sum(map(len, by_role.values())) == len(list(jobs_of_step(schedule)))


def test_an_unknown_role_is_an_error():
    schedule = build_schedule("1f1b", pp=1, vpp=1, num_microbatches=1)
    expected = (
        "role 'warmup' is unknown; the jobs of a step are forward, backward, optimizer, "
        "learning rate"
    )
    with pytest.raises(ScheduleError, match=expected):
        find_role("warmup")
    with pytest.raises(ScheduleError, match=expected):
        list(jobs_of_role(schedule, "warmup"))


@pytest.mark.parametrize("text", ["0O0", "0L0", "O"])
def test_tables_hold_no_jobs_of_a_whole_step(text):
    """Their place follows from the table: plans, plugins and other systems have F, B, I and W."""
    with pytest.raises(ScheduleError, match="is malformed"):
        Job.parse(text)
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    rows = schedule.to_json()
    with pytest.raises(ScheduleError, match="is malformed"):
        Schedule.from_json(rows | {"jobs": [f"{row} {text}" for row in rows["jobs"]]})
    assert set(schedule_csv(schedule)) <= set("01FB,\n")


def test_they_are_drawn_behind_each_row():
    """Rank 0 ends two columns after rank 1, whose optimizer runs meanwhile."""
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    behind = [
        [(job, float(place > 0), float(place == 0)) for place, job in enumerate(step_jobs(rank))]
        for rank in range(2)
    ]
    assert draw_schedule(schedule, behind=behind) == (
        "1f1b: pp=2, 2 stages, 2 microbatches, 9 columns, bubble 33.3%\n"
        "rank 0 | F0 F1 .  .  B0--- .  B1--- O  L\n"
        "rank 1 | .  F0 B0--- F1 B1--- O  L"
    )
    cut = draw_schedule(schedule, behind=behind, max_columns=4).splitlines()
    assert cut[1:] == [
        "rank 0 | F0 F1 .  . … 7 more columns, O, L",
        "rank 1 | .  F0 B0--- … 7 more columns, O, L",
    ]


PLANS = {
    "1f1b": {"pp": 2},
    "zb_h1": {"pp": 2},
    "interleaved_1f1b": {"pp": 2, "vpp": 2},
    "sharded": {"pp": 2, "schedule": "zb_h1", "dp": 2, "zero_stage": 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_every_captured_op_is_in_one_kind_of_job(name):
    """Counted over the graph, block by block, without stages or jobs."""
    graph = capture_tiny("gpt")
    sizes = {"schedule": name, "num_microbatches": 4} | PLANS[name]
    plan = default_plan(graph, **sizes)
    schedule = schedule_of(plan)
    work = work_of_jobs(graph, plan, schedule)
    done = Counter(each for (kind, _), pieces in work.items() for each in pieces)

    # An op of a block runs forward once for each microbatch, in one kind of job.
    blocks = [(block.name, graph.classes[block.class_index]) for block in graph.blocks]
    ops = Counter((block, op.name) for block, program in blocks for op in program.ops)
    run = [each for each in done.elements() if each.part == "forward"]
    assert Counter(each[1:] for each in run if each.block != PREAMBLE) == ops
    # Of the preamble each stage runs what it reads, so what any block reads is run.
    read = tuple(n for b in graph.blocks for n in b.inputs if n in graph.preamble.outputs)
    needed = {op.name for op in graph.preamble.only(read).ops}
    assert {each.name for each in run if each.block == PREAMBLE} == needed

    # Of each op with a gradient, all of the gradient is made once: at once or in two parts.
    gradients = Counter(
        (each.block, each.name, each.part) for each in done.elements() if "gradient" in each.part
    )
    assert set(gradients.values()) == {1}
    made = {key[:2] for key in gradients}
    assert made == {
        (block, op.name)
        for block, program in blocks
        for op in program.ops
        if any(program.tensor[name].requires_grad for name in op.outputs)
    }

    # Each parameter is updated by the ranks that hold it, each once.
    updated = Counter(each.name for each in done.elements() if each.part == "update")
    assert set(updated) == {t.fqn for t in graph.params if t.requires_grad}
    kinds = {kind for kind, _ in work}
    assert {ROLES[kind] for kind in kinds} == set(Role)
    late = [p for (kind, _), p in work.items() if kind is JobKind.BACKWARD_WEIGHT]
    assert bool(late) == (schedule.name == "zb_h1")
    # FSDP2 reduces a block's gradients when its backward ends, so none may come later.
    assert all(bool(pieces) == (name == "zb_h1") for pieces in late)
