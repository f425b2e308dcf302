"""The event simulator against closed formulas, hand arithmetic, and the clock."""

import time
from dataclasses import replace
from fractions import Fraction

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import Job, Schedule, build_schedule
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.job_table import build_job_table
from planner.language.schedule.timing.simulate import simulate, simulate_until_stuck


@pytest.mark.parametrize("schedule", ["1f1b", "fthenb"])
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (2, 4), (4, 4), (4, 8), (8, 32)])
def test_bubble_of_equal_stages(schedule, pp, m):
    """P4: idle part of the step is (pp-1)/(m+pp-1), whatever F and B take."""
    table = build_schedule(schedule, pp=pp, vpp=1, num_microbatches=m)
    timeline = simulate(table, JobSeconds.equal(pp))
    assert timeline.bubble_fraction == pytest.approx(float(Fraction(pp - 1, m + pp - 1)))
    assert timeline.makespan_s == pytest.approx(3.0 * (m + pp - 1))


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_virtual_stages_divide_the_bubble(vpp):
    """V3: with v stages a rank the bubble is 1/v of the plain one, (pp-1)/(v*m+pp-1) of it all."""
    pp, m, part = 4, 8, 1.0 / vpp
    name = "1f1b" if vpp == 1 else "interleaved_1f1b"
    table = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
    timeline = simulate(
        table,
        JobSeconds.equal(pp * vpp, forward_s=part, backward_input_s=part, backward_weight_s=part),
    )
    assert timeline.makespan_s - 3.0 * m == pytest.approx(3.0 * (pp - 1) / vpp)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_short_messages_never_queue(name):
    """With transfers much shorter than jobs, links that queue are as good as free ones."""
    pp, m = 4, 8
    vpp = SCHEDULES[name].min_vpp
    table = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
    n = pp * vpp
    f, i, w = (tuple(base + 0.1 * s for s in range(n)) for base in (1.0, 1.1, 0.9))
    seconds = JobSeconds.of_stages(
        forward_s=f, backward_input_s=i, backward_weight_s=w, transfer_s=0.01
    )
    queued, free = simulate(table, seconds), simulate(table, seconds, links="free")
    assert queued.makespan_s == pytest.approx(free.makespan_s)
    assert queued.bubble_s == pytest.approx(free.bubble_s)


def test_messages_over_one_link_queue_up():
    """Hand arithmetic: F takes 1, the link 3 s a message. Four messages leave one after the
    other at 4, 7, 10, 13; the last stage's last F starts at 13 and everything follows."""
    table = build_schedule("fthenb", pp=2, vpp=1, num_microbatches=4)
    timeline = simulate(
        table,
        JobSeconds.equal(2, backward_input_s=0.5, backward_weight_s=0.5, transfer_s=3.0),
    )
    assert timeline.start_s[1][:4] == [4.0, 7.0, 10.0, 13.0]


def test_free_links_carry_all_messages_at_once():
    """The same with free links: sent at 1, 2, 3, 4, they are there at 4, 5, 6, 7."""
    table = build_schedule("fthenb", pp=2, vpp=1, num_microbatches=4)
    timeline = simulate(table, JobSeconds.equal(2, transfer_s=3.0), links="free")
    assert timeline.start_s[1][:4] == [4.0, 5.0, 6.0, 7.0]


def test_a_gradient_leaves_ahead_of_weight_gradients():
    """Hand arithmetic: 2 ranks, m = 2, F 1 s, I 1 s, W 1 s, no transfers. Stage 1 runs F 1-2,
    B 2-4, F 4-5, B 5-7. Sent 0.25 s ahead, the first gradient is there at 3.75 (F at 1-2 and
    then waiting), B 3.75-5.75; the last leaves at 6, B 6-8. At jobs' ends it takes 9 s."""
    table = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    bare = JobSeconds.equal(2)
    ahead = replace(bare, sends_ahead_s=(0.25, 0.25), last_sends_ahead_s=(1.0, 1.0))
    assert simulate(table, bare).start_s[0] == [0.0, 1.0, 4.0, 7.0]
    assert simulate(table, ahead).start_s[0] == [0.0, 1.0, 3.75, 6.0]
    assert simulate(table, ahead).start_s[1] == simulate(table, bare).start_s[1]
    assert simulate(table, ahead).makespan_s == 8.0


def test_jobs_of_one_rank_or_with_split_backwards_send_nothing_ahead():
    """Only a full backward for another rank makes its gradients in two parts."""
    for name, pp, vpp in (("1f1b", 1, 1), ("zb_h1", 2, 1)):
        table = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=4)
        bare = JobSeconds.equal(pp * vpp)
        ones = (1.0,) * pp
        ahead = replace(bare, sends_ahead_s=ones, last_sends_ahead_s=ones)
        assert simulate(table, ahead).end_s == simulate(table, bare).end_s


def test_big_tables_are_fast():
    """64 pp ranks x 8 stages x 512 microbatches: half a million jobs in two seconds."""
    pp, vpp, m = 64, 8, 512
    table = build_job_table(build_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m))
    start = time.process_time()
    timeline = simulate(
        table,
        JobSeconds.equal(pp * vpp),
    )
    assert time.process_time() - start < 2.0
    assert timeline.makespan_s == pytest.approx(3.0 * (m * vpp + pp - 1))


def test_a_table_that_never_ends_is_refused():
    good = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    first, *rest = good.jobs[1]
    stuck = Schedule(
        name="stuck",
        stage_to_pp_rank=good.stage_to_pp_rank,
        num_microbatches=2,
        jobs=((*good.jobs[0][1:], good.jobs[0][0]), (first, *rest)),
    )
    with pytest.raises(ScheduleError, match=r"never ends: pp ranks 0, 1"):
        simulate(stuck)


def test_times_of_another_number_of_stages_are_refused():
    table = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    with pytest.raises(ScheduleError, match=r"times of 3 stages given .* of 2 stages"):
        simulate(table, JobSeconds.equal(3))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_changed_row_is_that_of_the_table_of_the_changed_schedule(name):
    schedule = build_schedule(name, pp=3, vpp=1, num_microbatches=4)
    row = [*schedule.jobs[1][1:], schedule.jobs[1][0]]
    changed = build_job_table(schedule).with_row(1, row)
    again = build_job_table(changed.schedule)
    assert changed.schedule.jobs[1] == tuple(row)
    assert changed.schedule.jobs[::2] == schedule.jobs[::2]
    for mine, whole in zip(changed.rows, again.rows, strict=True):
        assert (mine.needs, mine.makes, mine.link) == (whole.needs, whole.makes, whole.link)
        assert mine.duration.tolist() == whole.duration.tolist()


def test_a_stuck_rank_says_what_it_waits_for():
    """Rank 1 waits for the output of microbatch 0, which rank 0 has behind the gradient of
    microbatch 1 that rank 1 will make; a weight gradient waits for the input gradient behind it."""
    crossed = simulate_until_stuck(table_of("0F1 0I1 0W1 0F0 0I0 0W0", "1F0 1I0 1W0 1F1 1I1 1W1"))
    assert crossed.stuck == {0: ("G", 1, 1), 1: ("F", 0, 0)}
    assert [len(row) for row in crossed.end_s] == [1, 0]
    backwards = simulate_until_stuck(table_of("0F0 0W0 0I0", "1F0 1I0 1W0"))
    assert backwards.stuck == {0: ("G", 0, 0)}
    early = simulate_until_stuck(table_of("0B0 0F0", "1F0 1B0"))
    assert early.stuck == {0: ("F", 0, 0), 1: ("F", 0, 0)}


def table_of(*rows: str) -> Schedule:
    jobs = tuple(tuple(map(Job.parse, row.split())) for row in rows)
    num_microbatches = 1 + max(job.microbatch_index for job in jobs[0])
    return Schedule(
        name="given",
        stage_to_pp_rank=tuple(range(len(rows))),
        num_microbatches=num_microbatches,
        jobs=jobs,
    )
