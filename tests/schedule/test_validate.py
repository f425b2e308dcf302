"""Faulty tables are refused with the cell marked; valid ones never are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import Job, JobKind, Schedule, build_schedule
from planner.language.schedule.timing.communication import (
    Transfer,
    communication_order,
    validate_communication,
)
from planner.language.schedule.validate import validate_schedule
from tests.schedule.tables import random_table

PLAIN = build_schedule("1f1b", pp=3, vpp=1, num_microbatches=4)
SPLIT = build_schedule("zb_h1", pp=3, vpp=1, num_microbatches=4)
FOLD = build_schedule("zb_v", pp=2, vpp=2, num_microbatches=4)
LOOP = build_schedule("interleaved_1f1b", pp=2, vpp=2, num_microbatches=4)

Rows = list[list[Job]]


def edited(schedule: Schedule, change: Callable[[Rows], None]) -> Schedule:
    """The schedule with its rows changed in place by `change`."""
    rows = [list(row) for row in schedule.jobs]
    change(rows)
    return replace(schedule, jobs=tuple(map(tuple, rows)))


def find(rows: Rows, text: str) -> tuple[int, int]:
    for rank, row in enumerate(rows):
        for position, job in enumerate(row):
            if str(job) == text:
                return rank, position
    raise AssertionError(f"no job {text}")


def drop(text: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rank, position = find(rows, text)
        del rows[rank][position]

    return change


def put(text: str, *, rank: int, position: int = 0) -> Callable[[Rows], None]:
    return lambda rows: rows[rank].insert(position, Job.parse(text))


def swap(first: str, second: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        (r1, p1), (r2, p2) = find(rows, first), find(rows, second)
        rows[r1][p1], rows[r2][p2] = rows[r2][p2], rows[r1][p1]

    return change


def turn_into(text: str, other: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rank, position = find(rows, text)
        rows[rank][position] = Job.parse(other)

    return change


def negative_stage(rows: Rows) -> None:
    rows[0][0] = Job(kind=JobKind.FORWARD, stage_index=-1, microbatch_index=0)


def negative_microbatch(rows: Rows) -> None:
    rows[0][0] = Job(kind=JobKind.FORWARD, stage_index=0, microbatch_index=-1)


def exchange_rows(rows: Rows) -> None:
    rows[0], rows[1] = rows[1], rows[0]


def warm_up_longer(rows: Rows) -> None:
    rows[0].insert(3, rows[0].pop(4))  # rank 0: F0 F1 F2 F3 B0 … holds four, 1f1b promises three


TABLE_FAULTS: list[tuple[str, Schedule, str]] = [
    ("missing F", edited(PLAIN, drop("1F2")), "no F of stage 1, microbatch 2 on pp rank 1"),
    ("missing B", edited(PLAIN, drop("0B3")), "no B or I of stage 0, microbatch 3"),
    ("missing I", edited(SPLIT, drop("2I1")), "no B or I of stage 2, microbatch 1"),
    ("missing W", edited(SPLIT, drop("1W3")), "I without W of stage 1, microbatch 3"),
    ("empty row", edited(PLAIN, lambda rows: rows[2].clear()), "no F of stage 2, microbatch 0"),
    ("row cut short", edited(PLAIN, lambda rows: rows[1].pop()), "no B or I of stage 1"),
    ("F twice", edited(PLAIN, put("0F1", rank=0)), "0F1 computes again what 0F1"),
    ("B twice", edited(PLAIN, put("2B0", rank=2, position=8)), "2B0 computes again what 2B0"),
    ("W twice", edited(SPLIT, put("0W0", rank=0, position=12)), "0W0 computes again"),
    ("B after I", edited(SPLIT, put("0B0", rank=0, position=12)), "0B0 computes again what 0I0"),
    ("W beside B", edited(PLAIN, put("0W0", rank=0, position=8)), "W beside B of stage 0"),
    ("B for I, W stays", edited(SPLIT, turn_into("1I1", "1B1")), "W beside B of stage 1"),
    ("I for B, no W", edited(PLAIN, turn_into("1B1", "1I1")), "I without W of stage 1"),
    ("on a wrong rank", edited(PLAIN, put("2F0", rank=0)), "2F0 is on pp rank 0, but stage 2"),
    ("rows exchanged", edited(PLAIN, exchange_rows), "1F0 is on pp rank 0, but stage 1"),
    ("stage too high", edited(PLAIN, put("3F0", rank=2)), r"stages are 0\.\.2"),
    ("stage negative", edited(PLAIN, negative_stage), r"is of stage -1, stages are 0\.\.2"),
    ("microbatch too high", edited(PLAIN, put("0F4", rank=0)), r"microbatches are 0\.\.3"),
    ("microbatch negative", edited(PLAIN, negative_microbatch), "is of microbatch -1"),
    ("one microbatch fewer", replace(PLAIN, num_microbatches=3), r"microbatches are 0\.\.2"),
    ("one microbatch more", replace(PLAIN, num_microbatches=5), "no F of stage 0, microbatch 4"),
    ("no microbatches", replace(PLAIN, num_microbatches=0), "must be at least 1"),
    ("B before its F", edited(PLAIN, swap("2F0", "2B0")), "order within a rank"),
    ("W before its I", edited(SPLIT, swap("0I2", "0W2")), "order within a rank"),
    ("a fold's turn reversed", edited(FOLD, swap("1F0", "2F0")), "order within a rank"),
    ("chunks reversed", edited(LOOP, swap("0F0", "2F0")), "deadlock"),
    ("a ring of two ranks", edited(PLAIN, swap("1F3", "1B0")), "deadlock"),
    ("a ring of all ranks", edited(PLAIN, swap("2B0", "2F3")), "deadlock"),
    ("a late gradient", edited(SPLIT, swap("2I0", "2F2")), "deadlock"),
    ("placed on no rank", replace(PLAIN, stage_to_pp_rank=(0, 1, 3)), "stage 2 is placed on pp"),
    ("placed on rank -1", replace(PLAIN, stage_to_pp_rank=(0, 1, -1)), "stage 2 is placed on pp"),
    ("rank without stage", replace(PLAIN, stage_to_pp_rank=(0, 1, 1)), "rank 2 holds no stage"),
    ("stages exchanged", replace(PLAIN, stage_to_pp_rank=(1, 0, 2)), "0F0 is on pp rank 0, but"),
    ("too much in flight", edited(PLAIN, warm_up_longer), "rank 0 has 4 .* limit 3; 0F3 is"),
]


@pytest.mark.parametrize(
    ("schedule", "message"), [fault[1:] for fault in TABLE_FAULTS], ids=[f[0] for f in TABLE_FAULTS]
)
def test_table_faults_are_caught(schedule: Schedule, message: str) -> None:
    """X9: each fault injected in a valid table is refused."""
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(schedule)


def test_at_least_thirty_faults() -> None:
    """X9."""
    assert len(TABLE_FAULTS) >= 30
    for schedule in (PLAIN, SPLIT, FOLD, LOOP):
        validate_schedule(schedule)


def test_error_prints_the_table_and_marks_the_cell() -> None:
    """X9: the reader sees where."""
    with pytest.raises(ScheduleError) as caught:
        validate_schedule(edited(PLAIN, swap("2F0", "2B0")))
    assert str(caught.value).splitlines() == [
        "schedule '1f1b': order within a rank breaks a dependency: 2B0 on pp rank 2 needs the "
        "forward of stage 2, microbatch 0, which pp rank 2 has further on",
        "rank   0 |  0F0  0F1  0F2  0B0  0F3  0B1  0B2 …",
        "rank   1 |  1F0  1F1  1B0  1F2  1B1  1F3  1B2 …",
        "rank   2 | [2B0] 2F0  2F1  2B1  2F2  2B2  2F3 …",
    ]


def test_deadlock_names_the_ring() -> None:
    """X9: who waits for whom."""
    with pytest.raises(ScheduleError) as caught:
        validate_schedule(edited(PLAIN, swap("1F3", "1B0")))
    text = str(caught.value)
    assert "0B0 on pp rank 0 needs the gradient of stage 1, microbatch 0" in text
    assert "1F3 on pp rank 1 needs the forward of stage 0, microbatch 3" in text
    assert "[1F3]" in text
    assert "[0B0]" in text


def test_an_in_flight_limit_may_be_given() -> None:
    """P6, P7: memory is checked before anything runs."""
    fthenb = build_schedule("fthenb", pp=2, vpp=1, num_microbatches=4)
    validate_schedule(fthenb, in_flight_limit=(4, 4))
    with pytest.raises(ScheduleError, match="rank 1 has 4 microbatch-stages in flight, limit 3"):
        validate_schedule(fthenb, in_flight_limit=(4, 3))
    with pytest.raises(ScheduleError, match="1 entries for pp=2"):
        validate_schedule(fthenb, in_flight_limit=(4,))


def test_a_thousand_valid_tables_are_accepted() -> None:
    """X9: no false alarm, and the derived order of sends and receives is safe for each."""
    rng = random.Random(0)
    for _ in range(1000):
        schedule = random_table(rng)
        validate_schedule(schedule)
        validate_communication(schedule, communication_order(schedule))


def runs_to_the_end(schedule: Schedule) -> bool:
    """Referee: run any rank whose next job has its inputs, until none can."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.jobs):
            if at[rank] == len(row):
                continue
            job = row[at[rank]]
            stage, i = job.stage_index, job.microbatch_index
            if job.kind is JobKind.FORWARD:
                needs = {("F", stage - 1, i)} if stage else set()
            elif job.kind is JobKind.BACKWARD_WEIGHT:
                needs = {("G", stage, i)}
            else:
                needs = {("F", stage, i)}
                if stage + 1 < schedule.num_stages:
                    needs.add(("G", stage + 1, i))
            if needs <= done:
                kind = "G" if job.kind in (JobKind.FULL_BACKWARD, "I") else str(job.kind)
                done.add((kind, stage, i))
                at[rank] += 1
                moved = True
    return all(at[rank] == len(row) for rank, row in enumerate(schedule.jobs))


def test_the_check_agrees_with_a_referee_on_shuffled_tables() -> None:
    """X9: a table is refused if and only if it would not end."""
    rng = random.Random(1)
    accepted = refused = 0
    for _ in range(600):
        schedule = random_table(rng)
        rows = [list(row) for row in schedule.jobs]
        for _ in range(rng.randint(1, 2)):
            row = rng.choice(rows)
            a = rng.randrange(len(row))
            b = min(len(row) - 1, a + rng.randint(1, 3))
            row[a], row[b] = row[b], row[a]
        schedule = replace(schedule, jobs=tuple(map(tuple, rows)))
        if runs_to_the_end(schedule):
            validate_schedule(schedule)
            accepted += 1
        else:
            with pytest.raises(ScheduleError, match=r"deadlock|order within a rank"):
                validate_schedule(schedule)
            refused += 1
    assert accepted > 100
    assert refused > 100


Queues = list[list[Transfer]]


def queue_fault(name: str) -> Queues:
    """The safe queues of PLAIN with one fault."""
    queues = [list(queue) for queue in communication_order(PLAIN)]
    if name == "receive missing":
        del queues[1][0]
    elif name == "receive twice":
        queues[1].append(queues[1][0])
    elif name == "at a stranger":
        queues[2].append(queues[0][0])
    elif name == "rank missing":
        queues.pop()
    elif name == "conflicting orders":
        queues[1][0], queues[1][-1] = queues[1][-1], queues[1][0]
    elif name == "gradient before the forward that leads to it":
        for queue in queues[1:]:  # both ends agree, and still it can't be
            queue.sort(key=lambda t: not (t.is_gradient and t.src_pp_rank == 2))
    return queues


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("receive missing", r"0F0>1F0 is in the queues of pp ranks \[0\]; it must .* \[0, 1\]"),
        ("receive twice", r"0F0>1F0 is in the queues of pp ranks \[0, 1, 1\]"),
        ("at a stranger", r"0F0>1F0 is in the queues of pp ranks \[0, 1, 2\]"),
        ("rank missing", "2 queues given for pp=3"),
        ("conflicting orders", "sends and receives deadlock: pp rank 0 at 0F0>1F0"),
        ("gradient before the forward that leads to it", "sends and receives deadlock"),
    ],
)
def test_communication_faults_are_caught(name: str, message: str) -> None:
    """X9: an order that could hang is refused."""
    with pytest.raises(ScheduleError, match=message):
        validate_communication(PLAIN, queue_fault(name))


def test_golden_communication_order() -> None:
    """G17: transfers of two ranks in the order their results appear."""
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=3)
    order = communication_order(schedule)
    assert [str(t) for t in order[0]] == [
        "0F0>1F0",
        "0F1>1F1",
        "1B0>0B0",
        "0F2>1F2",
        "1B1>0B1",
        "1B2>0B2",
    ]
    assert order[0] == order[1]


def test_skip_edges_have_their_own_transfers() -> None:
    """G8: a value used two stages on goes straight there, and its gradient straight back."""
    edges = [(0, 1), (1, 2), (0, 2)]
    order = communication_order(PLAIN, edges)
    validate_communication(PLAIN, order)
    assert sum(str(t) == "0F3>2F3" for t in order[2]) == 1
    assert sum(str(t) == "2B3>0B3" for t in order[0]) == 1
    without = communication_order(PLAIN, edges, gradient_edges=edges[:2])
    assert not [t for t in without[0] if str(t) == "2B3>0B3"]
    with pytest.raises(ScheduleError, match=r"edge \(2, 1\) is not from a stage to a later one"):
        communication_order(PLAIN, [(2, 1)])
