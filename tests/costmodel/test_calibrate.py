"""A profile learns from the run of one plan, and predicts other plans better."""

from dataclasses import replace

import pytest

from costmodel import CostCache, estimate
from costmodel.calibrate import calibrated, observe
from costmodel.compare import WARM_UP_STEPS, as_rank_timelines
from costmodel.execution.executed import in_training
from costmodel.time.plan_price import price_plan
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.timeline import JOB_KINDS, Span
from profiles import Profile, load_profile
from profiles.records import Calibration, Factor
from tests.captures import capture_wide_llama

STEPS = WARM_UP_STEPS + 4


@pytest.fixture(scope="module")
def graph():
    return capture_wide_llama(  # the same as in tests/search: captured once
        2048,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


@pytest.fixture(scope="module")
def described():
    return load_profile("h100-sxm5-80gb")


@pytest.fixture(scope="module")
def machine(described):
    """The machine that runs: its host is slower, its optimizer and its collectives too."""
    slower = {"launch": 1.3, "product backward": 1.5, "light backward": 1.5, "adamw": 2.0}
    slower |= {"all_reduce 2x1": 1.6}
    known = Calibration.model_construct(
        factors={term: Factor(value=value, sigma=0.0) for term, value in slower.items()}, runs=()
    )
    file = described.file.model_copy(update={"calibration": known})
    return Profile(file, described.ops, described.collectives)


def record(graph, machine, plan):
    """What ranks of a machine record of a plan: jobs, and the exchange ahead of the optimizer's."""
    costs = CostCache(graph, in_training(machine, plan.world_size))
    answer, price = estimate(graph, machine, plan, costs=costs), price_plan(plan, costs)
    lines = []
    for line in as_rank_timelines(answer.timeline):
        end_s = max(span.end_s for span in line.spans if span.kind in JOB_KINDS)
        after_s = float(price.exposed.after_s.sum())
        spans = [
            *line.spans,
            Span(kind="REDUCE", name="REDUCE", step=0, start_s=end_s, end_s=end_s + after_s),
        ]
        steps = [
            replace(span, step=step, start_s=step + span.start_s, end_s=step + span.end_s)
            for step in range(STEPS)
            for span in spans
        ]
        lines.append(replace(line, spans=tuple(steps)))
    return tuple(lines)


def plans_of(graph):
    """One plan to learn from, and others."""
    learned = default_plan(graph, dp=2, microbatch_size=2, num_microbatches=2)
    others = [
        default_plan(graph, dp=2, microbatch_size=4, num_microbatches=1),
        default_plan(graph, pp=2, microbatch_size=2, num_microbatches=4),
        default_plan(graph, dp=2, microbatch_size=1, num_microbatches=2, recompute="full"),
    ]
    return learned, others


def test_errors_of_plans_that_were_not_run_fall(graph, described, machine):
    learned, others = plans_of(graph)
    taught = calibrated(described, graph, learned, record(graph, machine, learned))

    def errors(profile):
        return [
            abs(estimate(graph, profile, p).step_s / estimate(graph, machine, p).step_s - 1)
            for p in others
        ]

    assert max(errors(described)) > 0.15
    assert max(errors(taught)) < 0.06
    found = taught.file.calibration.factors
    assert found["adamw"].value == pytest.approx(2.0, rel=0.1)
    assert found["all_reduce 2x1"].value == pytest.approx(1.6, rel=0.1)


def test_learning_again_from_the_same_run_changes_nothing(graph, described, machine):
    """What a run says is counted from the profile without factors, however often it is read."""
    learned, _ = plans_of(graph)
    run = record(graph, machine, learned)
    once = calibrated(described, graph, learned, run)
    assert calibrated(once, graph, learned, run).file == once.file
    assert observe(once, graph, learned, run) == observe(described, graph, learned, run)


def test_each_time_is_the_sum_of_its_terms(graph, described, machine):
    """The optimizer is AdamW's alone; no job has a part of it."""
    learned, _ = plans_of(graph)
    run = observe(described, graph, learned, record(graph, machine, learned))
    found = {seen.what: seen for seen in run.observations}
    update = found["optimizer of pp rank 0"]
    assert set(update.parts_s) == {"adamw"}
    assert update.parts_s["adamw"] == pytest.approx(update.predicted_s)
    assert "adamw" not in found["B of stage 0"].parts_s
    assert sum(found["step"].parts_s.values()) == pytest.approx(found["step"].predicted_s, rel=0.02)


def test_a_run_of_another_plan_teaches_nothing(graph, described, machine):
    learned, others = plans_of(graph)
    with pytest.raises(PlannerError, match="only in the"):
        calibrated(described, graph, others[1], record(graph, machine, learned))
