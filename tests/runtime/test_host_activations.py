"""M23, M24: activations that wait on the host give the same bits and leave the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import planner
from planner.capture.source.model_file import ModelSource
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.offloads import offloads_of
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.builders import PlainGPT, gpt_batch, tiny_models
from tests.runtime.scenarios import capture
from tests.spawn import run_ranks


def with_offload(plan: Plan) -> Plan:
    stages = [s.model_copy(update={"activations_on_host": True}) for s in plan.stages]
    return plan.model_copy(update={"stages": tuple(stages)})


def test_trips_follow_from_the_row():
    """What waits less than a whole job stays; positions are those of the picture."""
    row = build_schedule("fthenb", pp=2, vpp=1, num_microbatches=4).jobs[0]
    assert " ".join(map(str, row)) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    found = offloads_of(row, {0})
    assert [(t.microbatch_index, t.forward, t.backward) for t in found] == [
        (m, m, m + 4) for m in range(4)
    ]
    assert [[t.is_away(p) for p in range(8)].index(True) for t in found] == [2, 3, 4, 5]
    assert not offloads_of(row, {1})
    one_f_one_b = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=4)
    assert all(not offloads_of(row, {0, 1}) for row in one_f_one_b.jobs)


def train_each(plans: list[tuple[str, Plan]]) -> list[tuple[list[float], dict, dict]]:
    answers = []
    for name, plan in plans:
        torch.manual_seed(0)
        tiny = MODELS[name]
        engine = planner.apply(plan, tiny.build(), loss=tiny.loss)
        losses = [engine.step(tiny.batch(plan.global_batch)).item() for _ in range(2)]
        assert engine._away is None or not engine._away._parcels
        answers.append((losses, engine.full_state_dict(), engine.full_gradients()))
    return answers


MODELS = tiny_models()


MANY = {"num_microbatches": 5, "schedule": "fthenb"}
CASES = {
    "dp2 ZeRO-3": ("gpt", {"dp": 2, "zero_stage": 3, **MANY}),
    "unet": ("unet", {"pp": 2, **MANY}),
    "pp2": ("gpt", {"pp": 2, **MANY}),
    "pp2 selective": ("gpt", {"pp": 2, "recompute": "selective", **MANY}),
    "pp2 full": ("gpt", {"pp": 2, "recompute": "full", **MANY}),
    "interleaved": (
        "gpt",
        {"pp": 2, "vpp": 2, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
    ),
}


@pytest.mark.parametrize(
    "names",
    [("pp2 selective",), pytest.param(tuple(CASES), marks=pytest.mark.slow)],
    ids=["one", "every"],
)
def test_the_same_bits_with_activations_on_the_host(names):
    """Two stages, ZeRO, recomputation of both kinds, weight gradients apart."""
    cases = [CASES[name] for name in names]
    plans = [(model, default_plan(capture(model), **choices)) for model, choices in cases]
    both = [pair for name, plan in plans for pair in ((name, plan), (name, with_offload(plan)))]
    answers = run_ranks(train_each, 2, both)[0]
    for name, without, there in zip(names, answers[::2], answers[1::2], strict=True):
        assert there[0] == without[0], name
        for found, expected in zip(there[1:], without[1:], strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[n], expected[n]) for n in expected), name


def verify_each(plans: list[Plan]) -> list[VerifyReport | None]:
    source = ModelSource(
        path=Path("gpt.py"), build=PlainGPT, batch=gpt_batch, loss=None, dependencies=()
    )
    return [compare_with_one_process(plan, source, steps=2) for plan in plans]


def test_offloaded_plans_compute_what_one_process_computes():
    """M23: `planner verify` in fp64, of everything on the host at once."""
    many = {"num_microbatches": 6, "schedule": "fthenb"}
    plans = [
        with_offload(default_plan(capture("gpt"), **choices)).model_copy(
            update={"optimizer_on_host": True}
        )
        for choices in ({"pp": 2, **many}, {"dp": 2, "zero_stage": 1, **many})
    ]
    for report in run_ranks(verify_each, 2, plans)[0]:
        assert report.passed, report
        assert report.largest < 1e-10
