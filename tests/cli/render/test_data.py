"""What `--json` prints: each key has the number that it names, in its unit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.render import data
from costmodel.compare import JobComparison, JobsAlike, RunComparison
from costmodel.failures import Goodput
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.simulate import Timeline
from planner.timeline import RankTimeline, Span
from search import SearchResult
from search.report.explain import Comparison
from search.report.remedies import Advice, Remedy
from tests.plan.test_diff import plan_of


def plan(step_s: float, peak_bytes: int = 2**30, **time_s: float):
    told = {"step_s": step_s, "peak_bytes": peak_bytes, "time": time_s}
    return plan_of("pp2", estimate=told)


def test_a_refused_search_lists_all_ways_out_that_there_are():
    def way(what: str) -> Remedy:
        return Remedy(what=what, request=None, plan=plan(2.0, 7))  # type: ignore[arg-type]

    result = SearchResult(
        plan=None, certificate=None, reasons=("`memory_limit_bytes` 3 GiB is too little",),
        smallest_memory_bytes=11,
    )  # fmt: skip
    advice = Advice(memory=way("more memory"), devices=None, remedies=(way("`tp` 2"),))
    found = data.refused_search(result, advice)
    assert found["fits"] is False
    assert found["reasons"] == ["--memory-limit 3 is too little"]
    assert found["smallest_memory_bytes"] == 11
    assert found["instead"] == [
        {"what": "--tp 2", "step_s": 2.0, "peak_bytes": 7},
        {"what": "more memory", "step_s": 2.0, "peak_bytes": 7},
    ]


def test_goodput_has_every_fraction_and_saves_in_whole_steps():
    parts = {"useful": 0.9, "checkpoints": 0.04, "lost": 0.03, "restarting": 0.02, "slow": 0.01}
    found = data.goodput_data(
        Goodput(mtbf_s=5e4, interval_s=700.0, **parts), num_nodes=32, step_s=2.0
    )
    assert {name: found[f"{name}_fraction"] for name in parts} == parts
    assert {f.name for f in fields(Goodput)} == {*parts, "mtbf_s", "interval_s"}
    assert (found["checkpoint_interval_s"], found["checkpoint_interval_steps"]) == (700.0, 350)
    rare = data.goodput_data(Goodput(mtbf_s=1, interval_s=1, **parts), num_nodes=1, step_s=9.0)
    assert rare["checkpoint_interval_steps"] == 1


def test_a_plan_is_told_without_its_estimate_which_stands_apart():
    found = data.plan_data(Path("plan.json"), plan(2.0))
    assert "estimate" not in found["plan"]
    assert found["estimate"]["step_s"] == 2.0
    assert found["plan"]["pp"] == 2


def test_choices_are_compared_part_by_part_the_given_ones_first():
    slow, best = plan(3.0, compute_s=1.0, bubble_s=2.0), plan(2.0, compute_s=1.5, bubble_s=0.5)
    found = data.comparison_data(Comparison(given=slow, best=best, shortfall=(), profile="a test"))
    assert found["fits"] is True
    assert found["is_best"] is False
    assert found["parts"] == [
        {"part": "bubble_s", "given_s": 2.0, "best_s": 0.5},
        {"part": "compute_s", "given_s": 1.0, "best_s": 1.5},
    ]
    assert (found["given"]["step_s"], found["best"]["step_s"]) == (3.0, 2.0)
    same = data.comparison_data(Comparison(given=best, best=best, shortfall=(), profile="a test"))
    assert same["is_best"] is True


def test_choices_that_do_not_fit_are_no_best_plan():
    found = data.comparison_data(
        Comparison(given=None, best=plan(1.0), shortfall=("rank 0: `tp` 2",), profile="a test")
    )
    assert (found["fits"], found["is_best"], found["given"]) == (False, False, None)
    assert found["refused"] == ["rank 0: --tp 2"]
    assert found["parts"] == []


def timeline(**changes: Any) -> Timeline:
    """Two ranks, two microbatches: rank 0 works 5 s of 8 s, rank 1 6 s."""
    parts: dict[str, Any] = {
        "schedule": build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2),
        "start_s": ((0.0, 1.0, 4.0, 7.0), (1.0, 2.0, 4.0, 5.0)),
        "end_s": ((1.0, 2.0, 6.0, 8.0), (2.0, 4.0, 5.0, 7.0)),
    }
    return Timeline(**(parts | changes))


def test_a_timetable_has_each_job_of_each_rank():
    found = data.timeline_data(timeline(), 9.0)
    assert (found["step_s"], found["makespan_s"]) == (9.0, 8.0)
    assert found["bubble_fraction"] == pytest.approx(5 / 16)
    first, second = found["ranks"]
    assert (first["works_s"], first["waits_s"], first["ends_s"]) == (5.0, 3.0, 8.0)
    assert second["jobs"][2] == {
        "kind": "F", "stage": 1, "microbatch": 1, "start_s": 4.0, "end_s": 5.0
    }  # fmt: skip
    assert first["step_jobs"] == []
    once = (((8.0, 8.5), (8.5, 8.6)), ((6.0, 7.0), (7.0, 7.1)))
    ranks = data.timeline_data(timeline(step_jobs_s=once), 9.0)["ranks"]
    assert ranks[1]["step_jobs"][0] == {"kind": "O", "start_s": 6.0, "end_s": 7.0}
    assert [job["kind"] for job in ranks[0]["step_jobs"]] == ["O", "L"]


def test_a_recording_has_medians_over_its_steps():
    def spans(of_step: list[float]) -> tuple[Span, ...]:
        return tuple(
            Span(kind="F", name="F0.0", step=step, start_s=10.0 * step, end_s=10.0 * step + seconds,
                 stage=0, microbatch=0)
            for step, seconds in enumerate(of_step)
        )  # fmt: skip

    lines = [
        RankTimeline(rank=rank, pp_rank=rank // 2, clock_offset_s=0.0, spans=spans(of_step))
        for rank, of_step in ((3, [4.0] * 3), (1, [1.0, 3.0, 2.0]))
    ]
    found = data.recording_data(Path("run"), lines)
    assert [each["rank"] for each in found["ranks"]] == [1, 3]
    assert found["ranks"][0] == {
        "rank": 1, "pp_rank": 0, "num_steps": 3, "pipeline_s": 4.0, "compute_s": 2.0,
        "collective_s": 0.0, "optimizer_s": 0.0, "bubble_fraction": 0.5,
        "lanes": [],
    }  # fmt: skip


def test_what_is_exchanged_is_told_by_lane():
    """Of 3 s in a job 2 are beside compute, of 1 s behind it none; in one of three steps twice."""
    spans = tuple(
        Span(kind="COLLECTIVE", name="collectives", step=step, start_s=start_s, lane=lane,
             end_s=start_s + times * seconds, hidden_s=times * hidden_s, number=4, num_bytes=7,
             stage=0, microbatch=1)
        for step, times in enumerate((1, 2, 1))
        for lane, start_s, seconds, hidden_s in (("tp", 0.0, 3.0, 2.0), ("dp", 9.0, 1.0, 0.0))
    )  # fmt: skip
    line = RankTimeline(rank=0, pp_rank=0, clock_offset_s=0.0, spans=spans)
    job = Span(kind="F", name="F0.1", step=0, start_s=0.0, end_s=9.0, stage=0, microbatch=1)
    (rank,) = data.recording_data(Path("run"), [replace(line, spans=(job, *spans))])["ranks"]
    assert rank["lanes"] == [
        {"lane": "tp", "hidden_s": 2.0, "exposed_s": 1.0},
        {"lane": "dp", "hidden_s": 0.0, "exposed_s": 1.0},
    ]
    first, *_ = data.timeline_data(timeline(), 9.0, [line])["ranks"]
    assert first["exchanges"][0] == {
        "lane": "tp", "name": "collectives", "stage": 0, "microbatch": 1, "start_s": 0.0,
        "end_s": 3.0, "hidden_s": 2.0, "exposed_s": 1.0, "num_collectives": 4, "num_bytes": 7,
    }  # fmt: skip


def test_a_run_is_told_beside_its_prediction():
    jobs = JobComparison(jobs=JobsAlike.of(1, 2, "B"), predicted_s=0.1, measured_s=0.12, count=8)
    found = data.run_data(
        RunComparison(
            jobs=(jobs,), predicted_step_s=1.0, measured_step_s=1.2,
            predicted_bubble_fraction=0.1, measured_bubble_fraction=0.2, num_steps=5,
        )
    )  # fmt: skip
    assert (found["predicted_step_s"], found["measured_step_s"]) == (1.0, 1.2)
    assert (found["predicted_bubble_fraction"], found["measured_bubble_fraction"]) == (0.1, 0.2)
    assert found["jobs"] == [
        {"of": "stage 2", "kind": "B", "predicted_s": 0.1, "measured_s": 0.12, "num_jobs": 8}
    ]


def test_a_proof_says_what_was_shown_and_what_was_not():
    part = SimpleNamespace(name="blocks", counted="4 of 4", times_rounding=2.5, seconds=1.5,
                           faults=("f",))  # fmt: skip
    proof: Any = SimpleNamespace(passed=False, world_size=8, parts=(part,), cuts=("pp 2",),
                                 unproven=("speed",))  # fmt: skip
    assert data.proof_data(proof) == {
        "passed": False, "num_ranks": 8, "run_as": ["pp 2"], "not_proven": ["speed"],
        "parts": [{"name": "blocks", "shown_on": "4 of 4", "times_rounding": 2.5, "took_s": 1.5,
                   "faults": ["f"]}],
    }  # fmt: skip


def test_factors_of_a_calibration_have_their_spread():
    factor = SimpleNamespace(value=1.1, sigma=0.05)
    calibration = SimpleNamespace(factors={"compute": factor}, error_before=0.2, error_after=0.04)
    profile: Any = SimpleNamespace(
        file=SimpleNamespace(calibration=calibration), expert_imbalance=0.3
    )
    assert data.calibration_data(profile, Path("mine")) == {
        "profile_folder": "mine", "factors": {"compute": {"value": 1.1, "sigma": 0.05}},
        "error_before": 0.2, "error_after": 0.04, "expert_imbalance": 0.3,
    }  # fmt: skip
