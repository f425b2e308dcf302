"""The best plans of a search, and the choice between them by what they took."""

from dataclasses import replace

import pytest

from commands.common.measured import best_plans, check_measurable, choose_measured
from planner.errors import PlannerError
from planner.runtime.proofs.trials import Trial, TrialSettings
from profiles import load_profile
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.find_plan import search_among
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=2)
NUM_BEST = 5
ASKED = SearchRequest(num_devices=2, global_batch=8, recompute="none", num_best=NUM_BEST)


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def found(gpt):
    return find_plan(gpt, MACHINE, ASKED)


def test_the_best_plans_are_those_of_all_configurations(gpt, found):
    """Each configuration's plan is the answer of a search in which nothing else is left."""
    candidates = Candidates.of(gpt, MACHINE, ASKED)
    seconds = []
    for shape in candidates.shapes(ASKED):
        for configuration in shape.configurations():
            alone = replace(
                ASKED,
                num_best=1,
                **{axis: configuration.degrees[axis] for axis in ("dp", "cp", "tp")},
                pp=configuration.pp,
                vpp=configuration.vpp,
                microbatch_size=configuration.microbatch_size,
                zero=configuration.zero,
                schedule=configuration.schedule if configuration.pp > 1 else None,
            )
            plan = search_among(candidates, alone, runners_up=False).plan
            assert plan is not None
            seconds.append(plan.estimate["step_s"])
    plans = best_plans(found)
    assert [plan.estimate["step_s"] for plan in plans] == pytest.approx(sorted(seconds)[:NUM_BEST])
    assert len({plan.model_copy(update={"estimate": {}}).model_dump_json() for plan in plans}) == 5


def test_more_plans_leave_the_best_and_its_proof_as_they_are(gpt, found):
    alone = find_plan(gpt, MACHINE, replace(ASKED, num_best=1))
    assert alone.next_best == ()
    assert found.plan.estimate["step_s"] == alone.plan.estimate["step_s"]
    assert found.certificate.gap == alone.certificate.gap == 0.0


def test_the_fastest_that_ran_is_chosen_and_keeps_what_was_measured(found):
    trials = [
        Trial(turns_s=(3.0, 2.0, 9.0)),
        Trial(failure="rank 1 was ended by SIGKILL"),
        Trial(turns_s=(2.5, 2.9, 2.4)),
        *[Trial(turns_s=(4.0,))] * (NUM_BEST - 3),
    ]
    plans = best_plans(found)
    chosen = choose_measured(found, trials, steps_of_turn=5)
    assert chosen.plan.stages == plans[2].stages
    assert chosen.next_best == (plans[0], plans[1], *plans[3:])
    measured = chosen.plan.estimate["measured"]
    assert (measured["step_s"], measured["turns_s"]) == (2.5, [2.5, 2.9, 2.4])
    assert [trial["measured_s"] for trial in measured["compared"]] == [3.0, None, 2.5, 4.0, 4.0]
    assert measured["compared"][1]["failure"] == "rank 1 was ended by SIGKILL"
    # Its proof is how far it is, by the model, from the best that there can be.
    third_s, best_s = plans[2].estimate["step_s"], plans[0].estimate["step_s"]
    assert chosen.certificate.gap == pytest.approx(1 - best_s / third_s)
    assert chosen.plan.estimate["certificate"]["best_s"] == third_s


def test_where_no_plan_ran_the_first_says_why(found):
    with pytest.raises(PlannerError, match=r"none of the 5 best plans ran .* no memory left"):
        choose_measured(found, [Trial(failure="no memory left")] * NUM_BEST, steps_of_turn=5)


@pytest.mark.parametrize(
    ("num_devices", "why"), [(16, "has 8 devices a node"), (2, "2 GPUs on this node and 0")]
)
def test_plans_for_what_is_not_here_are_not_measured(num_devices, why, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(PlannerError, match=why):
        check_measurable(load_profile("h100-sxm5-80gb"), num_devices)


def test_the_time_told_is_that_of_all_turns():
    """10 s to start; 2 turns of 10/3 s and 3 + 5 steps of 1 s; of 2 s."""
    settings = TrialSettings(turns=2, steps=5)
    assert settings.about_s([1.0, 2.0]) == pytest.approx(10 + 2 * (2 * 10 / 3 + 8 + 16))
