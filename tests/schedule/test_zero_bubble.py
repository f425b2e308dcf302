"""Schedules that split the backward: ZB-H1, ZB-V, DualPipe-V."""

from __future__ import annotations

import pytest

from planner.language.schedule import Schedule, build_schedule
from planner.language.schedule.draw import draw_schedule
from planner.language.schedule.timing.in_flight import in_flight
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate


def build(name: str, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    return build_schedule(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def picture(schedule: Schedule) -> list[str]:
    return [line.split("| ")[1] for line in draw_schedule(schedule).splitlines()[1:]]


def test_picture_of_zb_h1() -> None:
    """P17: W fills what 1F1B leaves idle (figure 3 of arXiv 2401.10241 has the same shape)."""
    assert picture(build("zb_h1", 3, 1, 4)) == [
        "F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3",
        ".  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ".  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_picture_of_zb_v() -> None:
    """P17: no rank idles between its first and its last job."""
    assert picture(build("zb_v", 2, 2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 "
        "3F3 3I3 3W3 0I2 0W2 0I3 0W3 .",
        ".   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 "
        "2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]


def test_picture_of_dualpipe_v() -> None:
    """P17: in the steady phase a forward stands beside a backward of the other chunk."""
    assert picture(build("dualpipe_v", 2, 2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1---- 3F2 0B0---- 3B2---- 3F3 .   0B1---- "
        "3B3---- 0I2 0W2 0I3 0W3",
        ".   1F0 2F0 1F1 2F1 1F2 2B0---- 2F2 1B0---- 1F3 2B1---- 2F3 1B1---- 2B2---- 1B2---- "
        "2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (4, 5, 3), (3, 4, 3)])
def test_zb_h1_bubble(pp: int, times: tuple[int, int, int]) -> None:
    """Step is m(F+I+W) + (pp-1)(F+I-W) while W is no longer than F and I (arXiv 2401.10241)."""
    f, i, w = times
    m = 2 * pp + 1
    stage_times = JobSeconds.equal(pp, forward_s=f, backward_input_s=i, backward_weight_s=w)
    step = simulate(build("zb_h1", pp, 1, m), stage_times, links="free").makespan_s
    assert step == m * (f + i + w) + (pp - 1) * (f + i - w)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_v_bubble_of_equal_times(pp: int) -> None:
    """Both V tables end pp-1 units after their work: only the ranks' staggered start is lost."""
    for m in (2 * pp, 2 * pp + 3, 4 * pp):
        for name in ("zb_v", "dualpipe_v"):
            timeline = simulate(build(name, pp, 2, m))
            assert timeline.makespan_s == 6 * m + pp - 1
    zb_v = simulate(build("zb_v", pp, 2, 4 * pp))
    for rank in range(pp):
        spans = zip(zb_v.end_s[rank], zb_v.start_s[rank][1:], strict=False)
        assert all(start == end for end, start in spans), "zb_v must not idle inside a rank"


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_ranks_of_zb_h2_wait_at_the_ends_alone(pp: int) -> None:
    """Qi et al. 2023, figure 3: each rank works from its first forward on without a break."""
    for m in (2 * pp - 1, 2 * pp, 4 * pp):
        played = simulate(build("zb_h2", pp, 1, m))
        for rank in range(pp):
            spans = zip(played.end_s[rank], played.start_s[rank][1:], strict=False)
            assert all(start == end for end, start in spans)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_memory_of_split_schedules(pp: int) -> None:
    """ZB-H1 and ZB-V hold on every rank what rank 0 of 1F1B does; DualPipe-V half a stage more,
    ZB-H2 nearly twice as much."""
    for m in (2 * pp, 3 * pp, 16 * pp):
        assert in_flight(build("zb_h2", pp, 1, m)) == (2 * pp - 1,) * pp
        assert in_flight(build("zb_h1", pp, 1, m)) == (pp,) * pp
        assert in_flight(build("zb_v", pp, 2, m)) == (2 * pp,) * pp
        most = min(2 * pp + 1, 2 * m)
        assert in_flight(build("dualpipe_v", pp, 2, m)) == (most,) * pp


def test_split_backward_shortens_the_step() -> None:
    """P17: same work, smaller bubble: 1F1B > ZB-H1 > ZB-V."""
    plain = simulate(build("1f1b", 4, 1, 8)).bubble_fraction
    h1 = simulate(build("zb_h1", 4, 1, 8)).bubble_fraction
    v = simulate(build("zb_v", 4, 2, 8)).bubble_fraction
    assert plain == pytest.approx(9 / 33)
    assert h1 == pytest.approx(3 / 27)
    assert v == pytest.approx(3 / 51)
