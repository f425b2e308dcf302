"""Properties of every registered schedule over all sizes: pp <= 8, vpp <= 4, microbatches <= 16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

import pytest

from planner.language.schedule import JobKind, Schedule, build_schedule
from planner.language.schedule.job_order import JobOrder, RoundTrips
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.communication import (
    communication_order,
    validate_communication,
)
from planner.language.schedule.timing.in_flight import (
    in_flight,
    in_flight_at_rank_peak,
    in_flight_per_stage,
    most_kept,
)
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule
from search.space.configuration import Pipeline
from search.space.job_tables import warmup_of

NAMES = sorted(SCHEDULES)


def all_sizes(name: str) -> Iterator[Schedule]:
    """Every table of a schedule within the bounds; the sizes it refuses are skipped."""
    spec = SCHEDULES[name]
    for pp in range(1, 9):
        for vpp in range(1, 5):
            for m in range(1, 17):
                if spec.why_not(pp=pp, vpp=vpp, num_microbatches=m) is None:
                    yield build_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_valid(name: str) -> None:
    """P12, X9: each job once, in an order that ends, within the promised memory."""
    count = 0
    for schedule in all_sizes(name):
        validate_schedule(schedule)
        kinds = Counter(job.kind for row in schedule.jobs for job in row)
        cells = schedule.num_stages * schedule.num_microbatches
        assert kinds[JobKind.FORWARD] == cells
        assert kinds[JobKind.FULL_BACKWARD] + kinds[JobKind.BACKWARD_INPUT] == cells
        assert kinds[JobKind.BACKWARD_INPUT] == kinds[JobKind.BACKWARD_WEIGHT]
        assert SCHEDULES[name].splits_backward or not kinds[JobKind.BACKWARD_INPUT]
        count += 1
    assert count >= 100


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_keep_their_order_on_a_stage(name: str) -> None:
    """G10, G11: jobs of one kind on one stage run in microbatch order."""
    for schedule in all_sizes(name):
        for row in schedule.jobs:
            last: dict[tuple[str, int], int] = {}
            for job in row:
                kind = "G" if job.kind in ("B", "I") else str(job.kind)
                previous = last.get((kind, job.stage_index), -1)
                # dualpipe_v splits off only some of the W jobs.
                step = job.microbatch_index - previous
                assert step == 1 or (job.kind is JobKind.BACKWARD_WEIGHT and step > 1)
                last[kind, job.stage_index] = job.microbatch_index


@pytest.mark.parametrize("name", NAMES)
def test_blocking_ordered_channels_do_not_deadlock(name: str) -> None:
    """X9: the derived order ends even with one blocking queue for each rank."""
    for schedule in all_sizes(name):
        if schedule.num_microbatches % 3 == 1 or schedule.num_microbatches == schedule.pp:
            validate_communication(schedule, communication_order(schedule))


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_agrees_with_a_count_over_time(name: str) -> None:
    """What the table says of memory is what happens when it runs."""
    for schedule in all_sizes(name):
        if schedule.num_microbatches not in (schedule.pp, 16):
            continue
        per_rank, per_stage = in_flight(schedule), in_flight_per_stage(schedule)
        at_peak = in_flight_at_rank_peak(schedule, (1.0,) * schedule.num_stages)
        kept = most_kept(schedule, (1.0,) * schedule.num_stages)
        for rank in range(schedule.pp):
            live: set[tuple[int, int]] = set()
            most, most_of_stage = 0, Counter[int]()
            for job in schedule.jobs[rank]:
                cell = (job.stage_index, job.microbatch_index)
                if job.kind is JobKind.FORWARD:
                    live.add(cell)
                elif job.kind is not JobKind.BACKWARD_INPUT:
                    live.remove(cell)
                most = max(most, len(live))
                for stage, count in Counter(stage for stage, _ in live).items():
                    most_of_stage[stage] = max(most_of_stage[stage], count)
            assert not live
            assert per_rank[rank] == most == sum(at_peak[rank])
            # What an input gradient lets go may be less than all that a microbatch keeps.
            is_split = any(job.kind is JobKind.BACKWARD_INPUT for job in schedule.jobs[rank])
            assert kept[rank] <= most if is_split else kept[rank] == most
            for stage in schedule.stages_of(rank):
                assert per_stage[stage] == most_of_stage[stage]


def bubble_formula(name: str, pp: int, vpp: int, m: int) -> float | None:
    """Idle time of a rank where F=I=W=1 in every stage, if the schedule has a known one."""
    if name == "naive":
        return 3 * m * (pp - 1)
    if name in ("fthenb", "1f1b", "eager_1f1b", "interleaved_1f1b", "interleaved_fthenb"):
        return 3 * (pp - 1)
    if name == "looped_breadth_first":
        return 3 * (pp - 1)
    if name == "fold_all_in_all_out":  # each turn of the fold drains and fills the pipeline
        return 3 * (pp - 1) * vpp
    if name == "zb_h1" or (name in ("zb_v", "dualpipe_v") and m >= 2 * pp):
        return pp - 1
    if name == "zb_h2" and m >= 2 * pp - 1:
        return pp - 1
    return None


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fold_first_in_first_out"])
def test_bubble_of_equal_stages(name: str) -> None:
    """P4, V3: idle time on every rank equals the schedule's formula."""
    checked = 0
    for schedule in all_sizes(name):
        pp, vpp = schedule.pp, schedule.num_stages // schedule.pp
        bubble = bubble_formula(name, pp, vpp, schedule.num_microbatches)
        if bubble is not None:
            assert simulate(schedule).bubble_s == (bubble,) * pp, (pp, vpp)
            checked += 1
    assert checked > 50


def test_eager_1f1b_hides_transfers() -> None:
    """P9: no slower than 1F1B where sending takes time, with memory between 1F1B and FThenB."""
    faster = 0
    for schedule in all_sizes("eager_1f1b"):
        pp, m = schedule.pp, schedule.num_microbatches
        plain = build_schedule("1f1b", pp=pp, vpp=1, num_microbatches=m)
        times = JobSeconds.equal(pp, transfer_s=0.5)
        eager_s, plain_s = (
            simulate(each, times, links="free").makespan_s for each in (schedule, plain)
        )
        assert eager_s <= plain_s
        faster += eager_s < plain_s
        pairs = zip(in_flight(plain), in_flight(schedule), strict=True)
        assert all(few <= more <= m for few, more in pairs)
    assert faster > 50


@pytest.mark.parametrize("transfer_s", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_eager_1f1b_pays_for_transfers_in_fill_and_drain_only(pp: int, transfer_s: float) -> None:
    """P9: 2(pp-1) transfers lengthen the step, however many microbatches; 1F1B pays in each."""
    times = JobSeconds.equal(pp, transfer_s=transfer_s)
    for m in (2 * pp, 4 * pp):
        eager = build_schedule("eager_1f1b", pp=pp, vpp=1, num_microbatches=m)
        plain = build_schedule("1f1b", pp=pp, vpp=1, num_microbatches=m)
        hidden_s = 3 * (m + pp - 1) + 2 * (pp - 1) * transfer_s
        assert simulate(eager, times, links="free").makespan_s == hidden_s
        assert simulate(plain, times, links="free").makespan_s > hidden_s


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stated_of_the_order_of_jobs_is_so(name: str) -> None:
    """X1: bounds rely on it for one stage a rank, so it is read off every table."""
    spec = SCHEDULES[name]
    for schedule in all_sizes(name):
        if schedule.num_stages > schedule.pp:
            # Nothing is stated of several stages a rank.
            continue
        m = schedule.num_microbatches
        order = spec.job_order(pp=schedule.pp, num_microbatches=m)
        for rank, row in enumerate(schedule.jobs):
            kinds = "".join(job.kind for job in row)
            gradients = kinds.replace("I", "B").replace("W", "")
            if order.round_trips is RoundTrips.FIRST_AND_LAST:
                # As many gradients follow the last forward as forwards precede the first.
                assert gradients.index("B") == order.warmup[rank]
                assert gradients[::-1].index("F") == order.warmup[rank]
            elif order.round_trips is RoundTrips.AFTER_LAST_FORWARD:
                assert gradients == "F" * m + "B" * m
            elif order.round_trips is RoundTrips.EVERY:
                assert gradients == "FB" * m
            if order.late_weights:
                assert kinds[kinds.rindex("I") :].count("W") == order.late_weights[rank]


@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.warmup])
def test_as_many_forwards_as_stated_run_before_the_first_backward(name: str) -> None:
    """M17: bounds of memory rely on it, so no stage may run fewer."""
    for schedule in all_sizes(name):
        vpp = schedule.num_stages // schedule.pp
        stated = warmup_of(Pipeline(name, schedule.pp, vpp, schedule.num_microbatches))
        assert len(stated) == schedule.num_stages
        for row in schedule.jobs:
            before = list(takewhile(lambda job: job.kind is JobKind.FORWARD, row))
            found = Counter(job.stage_index for job in before)
            stages = {job.stage_index for job in row}
            assert all(stated[stage] <= found[stage] for stage in stages)
            # One forward more stands there on the last rank of dualpipe_v.
            assert len(before) <= sum(stated[stage] for stage in stages) + 1


def test_where_backwards_run_whole_weights_are_not_late() -> None:
    order = SCHEDULES["zb_h1"].job_order(pp=4, num_microbatches=8)
    assert order.unsplit == SCHEDULES["1f1b"].job_order(pp=4, num_microbatches=8)


def test_what_is_not_stated_is_not_known() -> None:
    """A schedule that states nothing is of any order of jobs, with one stage a rank."""
    for name in ("zb_v", "dualpipe_v"):
        order = SCHEDULES[name].job_order(pp=2, num_microbatches=4)
        assert order == JobOrder(splits_backward=True)
    assert SCHEDULES["interleaved_1f1b"].job_order(pp=2, num_microbatches=4) == JobOrder()
