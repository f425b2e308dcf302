"""Choices beside degrees: recompute by op, precision, given stages; and answers kept on disk."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.errors import LayoutError
from search import SearchRequest, find_plan, find_plan_once
from search.result_cache import from_json, question_digest, to_json
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


def captured(precision="model", name="gpt"):
    tiny = tiny_models()[name]
    return capture_module(
        tiny.build(), tiny.batch(2), tiny.batch(3), loss=tiny.loss, name=name, precision=precision
    )


@pytest.fixture(scope="module")
def gpt():
    return captured()


def ask(**choices):
    return SearchRequest(num_devices=2, global_batch=8, **choices)


def test_selective_recompute_is_between_none_and_full(gpt):
    """G5, M27: each kind in bytes and in seconds; where none does not fit, the search takes
    the cheapest that does."""
    half = len(gpt.blocks) // 2
    fixed = {"pp": 2, "tp": 1, "microbatch_size": 1, "schedule": "fthenb", "zero": 0}
    fixed["balance"] = (half, len(gpt.blocks) - half)
    plans = {
        kind: find_plan(gpt, MACHINE, ask(recompute=kind, **fixed)).plan
        for kind in ("none", "selective", "full")
    }
    step = {kind: plan.estimate["step_s"] for kind, plan in plans.items()}
    peak = {kind: plan.estimate["peak_bytes"] for kind, plan in plans.items()}
    assert step["none"] < step["selective"] < step["full"]
    assert peak["none"] > peak["selective"] > peak["full"]
    free = find_plan(gpt, MACHINE, ask(memory_limit_bytes=peak["selective"], **fixed)).plan
    assert free is not None
    assert free.estimate["step_s"] <= step["selective"]
    assert "selective" in {stage.recompute for stage in free.stages}


def test_stages_of_a_given_balance(gpt):
    """G1: the stages are as given, for one and for several stages a rank; a wrong sum is an
    error; recompute is still chosen."""
    blocks = len(gpt.blocks)
    for balance, choices in (
        ((1, blocks - 1), {"pp": 2}),
        ((1, 2, 1, blocks - 4), {"pp": 2, "schedule": "interleaved_1f1b"}),
    ):
        result = find_plan(gpt, MACHINE, ask(balance=balance, **choices))
        assert result.plan is not None
        cuts = [stage.first_block for stage in result.plan.stages] + [blocks]
        assert tuple(b - a for a, b in pairwise(cuts)) == balance
    with pytest.raises(LayoutError, match=r"balance=1,1 deals 2 blocks and the model has"):
        find_plan(gpt, MACHINE, ask(balance=(1, 1)))
    with pytest.raises(LayoutError, match=r"is for 3 stages and pp\*vpp=2"):
        find_plan(gpt, MACHINE, ask(balance=(1, 1, blocks - 2), pp=2))


def test_bf16_is_priced_with_its_master_copies():
    """V14: 2 + 4 + 4 + 8 bytes a parameter, against 4 + 4 + 8 in fp32."""
    parts = {}
    for precision in ("model", "bf16"):
        request = ask(precision=precision, dp=2, zero=0, microbatch_size=4)
        plan = find_plan(captured(precision), MACHINE, request).plan
        assert plan is not None
        assert plan.precision == precision
        memory = plan.estimate["memory"][0]
        parts[precision] = [
            memory[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer", "activation")
        ]
    bf16, model = parts["bf16"], parts["model"]
    assert bf16[0] == pytest.approx(model[0] / 2, rel=0.01)
    assert bf16[1] == pytest.approx(model[1], rel=0.01)
    assert bf16[2] == pytest.approx(1.5 * model[2], rel=0.01)
    assert bf16[3] < model[3]


def test_the_same_question_is_searched_once(gpt, tmp_path, monkeypatch):
    """P27: a second search is a hit, in well under a second; another model, machine or request
    misses; so does whoever asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = find_plan_once(gpt, MACHINE_WITH_FILES, ask())
    start = time.process_time()
    second = find_plan_once(gpt, MACHINE_WITH_FILES, ask())
    assert time.process_time() - start < 0.5
    assert (first.was_kept, second.was_kept) == (False, True)
    assert second == first
    assert second.search_s == first.search_s
    assert not find_plan_once(gpt, MACHINE_WITH_FILES, ask(), use_cache=False).was_kept
    assert not find_plan_once(gpt, MACHINE_WITH_FILES, ask(tp=1)).was_kept
    # What a limit cut short is not kept; a finished answer is that of a limited search, too.
    cut_short = ask(dp=1, time_limit_s=0.0)
    assert find_plan_once(gpt, MACHINE_WITH_FILES, cut_short).is_out_of_time
    assert not find_plan_once(gpt, MACHINE_WITH_FILES, cut_short).was_kept
    assert find_plan_once(gpt, MACHINE_WITH_FILES, ask(time_limit_s=0.0)).was_kept


def test_what_a_kept_answer_depends_on(gpt):
    digests = {
        question_digest(graph, machine, request)
        for graph in (gpt, captured(name="mlp"))
        for machine in (MACHINE_WITH_FILES, replace(MACHINE_WITH_FILES, flop_per_s=1e12))
        for request in (ask(), ask(dp=2))
    }
    assert len(digests) == 8


def test_an_answer_survives_json(gpt):
    for request in (ask(), ask(memory_limit_bytes=1000)):
        result = find_plan(gpt, MACHINE, request)
        assert from_json(to_json(result)) == result


class _WithFiles(Machine):
    """The made-up machine with what a profile's digest is made of."""

    @property
    def file(self):
        return repr(self)

    ops = collectives = ()


MACHINE_WITH_FILES = _WithFiles(context_bytes=0.0, devices_per_node=4)


def test_recompute_is_tried_least_first_in_whatever_order_it_is_allowed(gpt):
    """M14, V11: kinds named most first are no reason to remake what fits without."""
    allow = (("recompute", "full"), ("recompute", "none"))
    plan = find_plan(gpt, MACHINE, ask(allow=allow)).plan
    assert {stage.recompute for stage in plan.stages} == {"none"}


def test_only_allowed_values_are_searched_and_no_forbidden_one(gpt):
    """M14, V11: `allow` and `forbid`, of degrees, schedules and recompute; allowing a value asks
    for it, be it one the search does not try by itself."""
    for allow, forbid in (
        ((("schedule", "fthenb"), ("pp", "2")), ()),
        ((("tp", "1"),), (("dp", "2"),)),
        ((("zero", "2"), ("dp", "2")), ()),
        ((("recompute", "full"), ("recompute", "selective")), (("recompute", "full"),)),
    ):
        plan = find_plan(gpt, MACHINE, ask(allow=allow, forbid=forbid)).plan
        chosen = {"recompute": {stage.recompute for stage in plan.stages}}
        chosen |= {name: {getattr(plan, name)} for name in ("schedule", "pp", "tp", "dp")}
        chosen["zero"] = {plan.zero_stage}
        for name in {name for name, _ in allow}:
            assert {str(v) for v in chosen[name]} <= {v for other, v in allow if other == name}
        for name, value in forbid:
            assert value not in {str(v) for v in chosen[name]}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"forbid": (("tp", "2"),), "tp": 2}, r"`tp` 2 and `forbid` tp=2 were given; drop one"),
        ({"allow": (("tp", "1"),), "tp": 2}, r"`allow` tp names 1 only; drop one of them"),
        ({"allow": (("tq", "1"),)}, r"`allow` tq=1 was given; a choice is one of dp, tp, pp"),
        ({"forbid": (("tp", "two"),)}, r"`forbid` tp=two was given; tp is a whole number"),
        ({"forbid": (("recompute", "all"),)}, r"recompute=all was given; use none, selective, f"),
        ({"forbid": (("zero", "7"),)}, r"`forbid` zero=7 was given; ZeRO stages are 0, 1, 2 and 3"),
        (
            {"allow": (("cp", "3"),)},
            r"`allow` cp=3 was given, and none of these divides `num_d",
        ),
        (
            {"allow": (("tp", "2"),), "forbid": (("tp", "2"),)},
            r"`allow` and `forbid` both name tp=2, which leaves no tp to search; drop one",
        ),
        (
            {"forbid": tuple(("recompute", kind) for kind in ("none", "selective", "full"))},
            r"every kind of recompute is forbidden",
        ),
    ],
)
def test_allow_and_forbid_say_what_they_do_not_understand(gpt, choices, message):
    with pytest.raises(LayoutError, match=message):
        find_plan(gpt, MACHINE, ask(**choices))
