"""X2: why a layout lost or was refused, in numbers that add up."""

import pytest

from profiles import load_profile
from search import SearchRequest
from search.describe import describe_comparison
from search.explain import compare_choices, differences, explain_shortfall
from tests.builders import tiny_models
from tests.captures import capture_module


@pytest.fixture(scope="module")
def gpt():
    tiny = tiny_models()["gpt"]
    return capture_module(tiny.build(), tiny.batch(2), tiny.batch(3), loss=tiny.loss, name="gpt")


@pytest.fixture(scope="module")
def machine():
    return load_profile("h100-sxm5-80gb")


def compare(gpt, machine, **choices):
    return compare_choices(
        gpt, machine, SearchRequest(num_devices=4, global_batch=8, model_file="gpt.py", **choices)
    )


def test_parts_of_the_difference_add_up(gpt, machine):
    """What each part costs more or less is the whole difference of the steps."""
    found = compare(gpt, machine, tp=4)
    given, best = found.given.estimate, found.best.estimate
    assert found.given.tp == 4
    assert given["step_s"] >= best["step_s"]
    by_part = sum(mine - theirs for _, mine, theirs in differences(given, best))
    assert by_part == pytest.approx(given["step_s"] - best["step_s"])


def test_free_choices_are_the_best_plan(gpt, machine):
    found = compare(gpt, machine)
    assert found.given == found.best
    assert "this is the best plan" in str(describe_comparison(found)[0])


def test_refusal_names_what_the_memory_is_for(gpt, machine):
    """The parts named add up to what is needed."""
    found = compare(gpt, machine, tp=4, memory_limit_bytes=2**31)
    assert found.given is None
    head, listed = found.shortfall[0].split(" at the least: ")
    needed = head.removeprefix("every rank needs ").removesuffix(" GiB of 2.0000")
    assert float(needed) > 2
    assert "context 2.0000" in listed
    assert "optimizer" in listed
    assert sum(float(part.split()[1]) for part in listed.split(", ")) == pytest.approx(
        float(needed), abs=1e-9
    )


def test_shortfall_is_of_ranks_over_the_limit_only(gpt, machine):
    plan = compare(gpt, machine, pp=2).given
    totals = [rank["total_bytes"] for rank in plan.estimate["memory"]]
    assert explain_shortfall(plan, max(totals)) == ()
    over = explain_shortfall(plan, min(totals) + 0.5 * (max(totals) - min(totals)))
    assert len(over) == sum(total > min(totals) for total in totals)
