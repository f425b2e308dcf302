"""Nothing fits: what would, each found by a search, in numbers that add up."""

import re
from dataclasses import replace

import pytest

from search import SearchRequest, find_plan
from search.report.explain import explain_saving, fullest_rank, listed_parts, rounded_parts
from search.report.remedies import find_advice, more_counts
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


def captured(precision="model"):
    tiny = tiny_models()["gpt"]
    return capture_module(
        tiny.build(), tiny.batch(2), tiny.batch(3), loss=tiny.loss, precision=precision
    )


@pytest.fixture(scope="module")
def gpt():
    return captured()


def ask(gpus=2, offload="none", **choices):
    return SearchRequest(num_devices=gpus, global_batch=8, offload=offload, **choices)


def peak(gpt, **choices):
    return int(find_plan(gpt, MACHINE, ask(**choices)).plan.estimate["peak_bytes"])


def advice(gpt, request, **options):
    refused = find_plan(gpt, MACHINE, request)
    assert refused.plan is None
    return find_advice(gpt, MACHINE, request, refused, **options), refused


def test_each_answer_is_a_search_that_succeeds(gpt):
    """M27, X2: more memory, more devices, or letting go of one fixed choice; each is asked
    again here, and the fewest devices and the least memory are no larger than they must be."""
    fixed = {"dp": 2, "zero": 0, "recompute": "none", "microbatch_size": 4}
    limit = int(0.8 * peak(gpt, **fixed))
    request = ask(**fixed, memory_limit_bytes=limit)
    found, _ = advice(gpt, request)
    for remedy in (found.memory, *found.remedies):
        plan = find_plan(gpt, MACHINE, remedy.request).plan
        assert plan.estimate["step_s"] == pytest.approx(remedy.step_s)
        assert remedy.peak_bytes <= (remedy.request.memory_limit_bytes or 0)
    assert found.devices is None, "dp=2 with everything else free of pp and tp cannot use more"
    said = [remedy.what for remedy in found.remedies]
    assert "`microbatch_size` 1 instead of 4" in said or "`microbatch_size` 2 instead of 4" in said
    assert any(what.startswith("`recompute` ") for what in said)
    steps = [remedy.step_s for remedy in found.remedies]
    assert steps == sorted(steps)
    assert all(remedy.request.num_devices == 2 for remedy in found.remedies)
    less = replace(request, memory_limit_bytes=int(0.998 * found.memory.request.memory_limit_bytes))
    assert find_plan(gpt, MACHINE, less).plan is None


def test_fewest_devices(gpt):
    """All choices free: the count named works, and none between it and the request's does."""
    limit = int(0.97 * find_plan(gpt, MACHINE, ask(memory_limit_bytes=1000)).smallest_memory_bytes)
    request = ask(memory_limit_bytes=limit)
    found, _ = advice(gpt, request)
    count = found.devices.request.num_devices
    assert found.devices.what == f"`num_devices` {count}"
    assert found.devices.plan.world_size == count
    assert found.devices.peak_bytes <= limit
    for fewer in more_counts(2, MACHINE):
        if fewer < count and 8 % fewer == 0:
            assert find_plan(gpt, MACHINE, replace(request, num_devices=fewer)).plan is None


def test_bf16_is_a_remedy(gpt):
    """V14: what the search itself never changes; the parts of what it saves add up."""
    fixed = {"dp": 2, "zero": 0, "recompute": "none", "microbatch_size": 4}
    request = ask(**fixed, memory_limit_bytes=int(0.95 * peak(gpt, **fixed)))
    found, refused = advice(gpt, request, recapture=lambda precision: captured(precision))
    made = next(remedy for remedy in found.remedies if remedy.what == "`precision` bf16")
    assert made.plan.precision == "bf16"
    said = explain_saving(refused.leanest, made.plan)
    total, parts = re.fullmatch(r"(\S+) \w+: (.*)", said).groups()
    shown = sum(float(part.split()[-1]) for part in parts.split(", "))
    assert shown == pytest.approx(float(total), abs=1e-9)
    saved = fullest_rank(refused.leanest)["total_bytes"] - made.peak_bytes
    assert saved > 0
    assert "activations -" in parts


def test_offload_is_a_remedy_where_it_was_ruled_out(gpt):
    """M27: a limit under which only what goes to the host makes it fit."""
    limit = int(0.97 * find_plan(gpt, MACHINE, ask(memory_limit_bytes=1000)).smallest_memory_bytes)
    found, _ = advice(gpt, ask(memory_limit_bytes=limit))
    made = next(remedy for remedy in found.remedies if remedy.what.startswith("`offload` "))
    assert made.plan.optimizer_on_host or any(s.activations_on_host for s in made.plan.stages)
    assert made.peak_bytes <= limit


def test_pairs_where_no_single_change_does(gpt):
    """Both a smaller microbatch and recompute are needed; each alone is refused."""
    fixed = {"dp": 2, "zero": 0, "recompute": "none", "microbatch_size": 4}
    least = {
        name: find_plan(gpt, MACHINE, ask(**{**fixed, name: None}, memory_limit_bytes=1000))
        .smallest_memory_bytes
        for name in fixed
    }  # fmt: skip
    limit = int(0.99 * min(least.values()))
    found, _ = advice(gpt, ask(**fixed, memory_limit_bytes=limit))
    assert found.remedies
    for remedy in found.remedies:
        assert remedy.what.count("`") == 4, "two fields"
        assert remedy.peak_bytes <= limit


@pytest.mark.parametrize(
    ("start", "machine", "counts"),
    [
        (1, Machine(devices_per_node=4), [2, 3, 4, 8, 12]),
        (6, Machine(devices_per_node=4), [8, 12, 16, 20, 24]),
        (2, Machine(devices_per_node=4, max_devices=4), [3, 4]),
        (4, Machine(devices_per_node=4, max_devices=4), []),
    ],
)
def test_counts_of_devices_to_try(start, machine, counts):
    """In a node any number, beyond whole nodes, and no more than the profile knows."""
    assert list(more_counts(start, machine))[:5] == counts


def test_rounded_parts_add_up():
    assert rounded_parts([1 / 3, 1 / 3, 1 / 3]) == [0.34, 0.33, 0.33]
    assert rounded_parts([-1.004, 0.504]) == [-1.0, 0.5]
    assert listed_parts({"a": 1.0, "b": 3.0, "c": 0.0}, 1) == "b 3.00, a 1.00"
