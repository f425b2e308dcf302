"""X2: why a layout lost or was refused, in numbers that add up."""

import re

import pytest

from commands.render.plans.search import describe_comparison
from planner.errors import LayoutError
from planner.units import format_bytes
from profiles import load_profile
from search import SearchRequest, find_plan
from search.report.explain import compare_choices, differences, explain_shortfall
from tests.captures import capture_tiny


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


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
    assert compare(gpt, machine, rp=2).best == found.best


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


def test_shortfall_in_words_that_add_up(gpt, machine):
    """X2, golden: 21.002 + 10.507 + 42.003 + 10.698 = 84.21 GiB, rounded so that it adds up."""
    gib = 2**30
    plan = compare(gpt, machine, pp=2, schedule="1f1b").given
    parts = {
        "parameter_bytes": 21.002 * gib,
        "gradient_bytes": 10.507 * gib,
        "optimizer_bytes": 42.003 * gib,
        "activation_bytes": 10.698 * gib,
        "communication_bytes": 0,
    }
    over = {**parts, "total_bytes": sum(parts.values())}
    under = {"parameter_bytes": 1.0, "total_bytes": 1.0}
    made = plan.model_copy(update={"estimate": {**plan.estimate, "memory": [under, over]}})
    last = made.stages[1]
    assert explain_shortfall(made, 80 * gib) == (
        f"stage 1 (blocks {last.first_block}..{last.last_block}) needs 84.21 GiB of 80.00 at the "
        "least: optimizer 42.00, weights 21.00, activations 10.70, gradients 10.51",
    )
    near = {**parts, "parameter_bytes": 16.793 * gib, "total_bytes": 80.001 * gib}
    close = made.model_copy(update={"estimate": {**plan.estimate, "memory": [under, near]}})
    assert "needs 80.001 GiB of 80.000 at the least" in explain_shortfall(close, 80 * gib)[0]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide `num_devices` 4, and degrees are never changed silently; "
         "rp * dp * cp * hp * tp * pp must equal 4, so use divisors of 4: 1, 2, 4"),
        ({"pp": 4, "vpp": 4}, "pp=4 * vpp=4 makes 16 stages, but the model has 6 blocks and a "
         "stage holds at least one; use pp * vpp <= 6"),
        ({"cp": 2, "dp": 4}, "dp=4 * cp=2 does not divide `num_devices` 4, and degrees are never "
         "changed silently; rp * dp * cp * hp * tp * pp must equal 4, so leave one of them out, or "
         "use `num_devices` 8"),
        ({"dp": 4, "microbatch_size": 4}, "`microbatch_size` 4 does not divide the 2 samples of a "
         "replica; use a divisor: 1, 2"),
        ({"pp": 4, "microbatch_size": 4}, "pp=4 needs at least 4 microbatches, but the batch gives "
         "at most 2 per replica; use `global_batch` 16, `microbatch_size` 2 or a smaller `pp`"),
        ({"tp": 4, "forbid": (("tp", "4"),)}, "`tp` 4 and `forbid` tp=4 were given; drop one of "
         "them"),
    ],
)  # fmt: skip
def test_each_rule_of_the_space_says_which_and_what_would_do(gpt, machine, choices, message):
    """X2, V11, golden: the whole sentence of each rule that refuses a layout without pricing it."""
    with pytest.raises(LayoutError) as refused:
        compare(gpt, machine, **choices)
    assert str(refused.value) == message


def test_slower_by_which_parts(gpt, machine):
    """X2: a runner-up's reason names the parts that make it slower, with its peak."""
    result = find_plan(gpt, machine, SearchRequest(num_devices=4, global_batch=8))
    assert result.runners_up
    for runner_up in result.runners_up:
        percent = 100 * (runner_up.step_s / result.plan.estimate["step_s"] - 1)
        assert runner_up.reason.startswith(f"{percent:.1f}% slower (")
        assert re.search(r"\): \+\S+ \w+ [a-z_]+", runner_up.reason)
        assert runner_up.reason.endswith(f"peak {format_bytes(runner_up.peak_bytes)}")
