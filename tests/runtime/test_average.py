"""Averages of weights are those of `AveragedModel` in one process (fp64), under any plan."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import planner
from planner.errors import PlanError
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.average import WeightAverage
from planner.runtime.step.engine import Engine
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny
from tests.runtime.beside import OneProcess, gap_by_tensor, sgd
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks


def train(plans: list[tuple[Plan, Plan]], folder: str) -> list[tuple[float, float, int]]:
    """Return for each (plan, plan to go on under) the gaps of averages and of a loss by them."""
    torch.set_default_dtype(torch.float64)
    found = []
    for number, (plan, later) in enumerate(plans):
        tiny, module = build("gpt")
        alone = OneProcess(module, sgd, loss=tiny.loss)
        expected = AveragedModel(alone.module, multi_avg_fn=get_ema_multi_avg_fn(0.6))
        engine = planner.apply(plan, module, optimizer=sgd(module))
        average = engine.average_weights(decay=0.6)
        for step in range(3):
            batch = tiny.batch(4 * (step + 1))
            batch = {k: v[4 * step :] for k, v in batch.items()}
            engine.step(batch)
            alone.step(batch)
            expected.update_parameters(alone.module)
            if step == 1:
                engine.save(f"{folder}/{number}")
                engine.close()
                _, module = build("gpt")
                engine = planner.apply(later, module, optimizer=sgd(module))
                average = engine.average_weights(decay=0.6)
                engine.load(f"{folder}/{number}")
        before = engine.full_state_dict()
        with average.applied():
            loss = engine.evaluate(batch).item()
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        wanted = loss_of(call_with_batch(expected.module, batch), batch, tiny.loss).item()
        gap = gap_by_tensor(average.full_state_dict(), dict(expected.module.named_parameters()))
        found.append((gap, abs(loss - wanted) / wanted, average.count))
        engine.close()
    return found


def test_averages_equal_one_process_and_go_on_under_another_plan(tmp_path):
    graph = capture("gpt", torch.float64)
    two = {"num_microbatches": 2, "microbatch_size": 2}
    half = {"num_microbatches": 2, "microbatch_size": 1, "dp": 2}
    tp = default_plan(graph, tp=2, **two)
    zero = default_plan(graph, zero_stage=3, **half)
    for gap, loss_gap, count in run_ranks(train, 2, [(zero, tp)], str(tmp_path))[0]:
        assert gap < 1e-10
        assert loss_gap < 1e-10
        assert count == 3


def test_the_mean_of_steps_and_what_is_refused(tmp_path):
    plan = default_plan(capture_tiny("mlp"), num_microbatches=1, microbatch_size=4)
    engine = planner.apply(plan, MlpWithTarget())
    with pytest.raises(PlanError, match=r"decay=1\.0 must be from 0"):
        engine.average_weights(decay=1.0)
    average = engine.average_weights(decay=None, every=2)
    seen = []
    for step in range(4):
        engine.step(mlp_batch(4))
        if step % 2:
            seen.append(engine.full_state_dict())
    found = average.full_state_dict()
    for name in found:
        torch.testing.assert_close(found[name], (seen[0][name] + seen[1][name]) / 2)
    with pytest.raises(PlanError, match="averaged already"):
        engine.average_weights()


def test_every_third_update_is_averaged_after_a_load_as_before(tmp_path):
    """From a checkpoint between two averages; also back from later steps of the same engine."""
    plan = default_plan(capture_tiny("mlp"), num_microbatches=1, microbatch_size=4)

    def begin() -> tuple[Engine, WeightAverage]:
        torch.manual_seed(0)
        engine = planner.apply(plan, MlpWithTarget())
        return engine, engine.average_weights(decay=0.5, every=3)

    def train(engine: Engine, until: int) -> None:
        while engine.steps < until:
            engine.step(mlp_batch(4), update=False)
            engine.step(mlp_batch(4))

    engine, average = begin()
    train(engine, 4)
    engine.save(tmp_path)
    train(engine, 10)
    undisturbed = average.full_state_dict()
    assert average.count == 3
    engine.load(tmp_path)
    train(engine, 10)
    other, again = begin()
    other.load(tmp_path)
    train(other, 10)
    for each in (average, again):
        assert each.count == 3
        found = each.full_state_dict()
        assert all(torch.equal(found[name], undisturbed[name]) for name in found)


def test_a_training_saved_without_averages_begins_them_from_its_weights(tmp_path):
    plan = default_plan(capture_tiny("mlp"), num_microbatches=1, microbatch_size=4)
    engine = planner.apply(plan, MlpWithTarget())
    engine.step(mlp_batch(4))
    engine.save(tmp_path)
    saved = engine.full_state_dict()
    engine.wait_for_save()
    again = planner.apply(plan, MlpWithTarget())
    average = again.average_weights(decay=None)
    again.step(mlp_batch(4))
    assert average.count == 1
    again.load(tmp_path)
    assert average.count == 0
    found = average.full_state_dict()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
