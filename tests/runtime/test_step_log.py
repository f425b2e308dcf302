"""A log's figures are those of the steps it covers."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.runtime import step_log
from planner.runtime.step_log import StepLog
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny


def _engine():
    plan = default_plan(capture_tiny("mlp"), num_microbatches=2, microbatch_size=2)
    return planner.apply(plan, MlpWithTarget(), max_grad_norm=1.0)


def test_figures_of_the_steps_since_the_last_line(tmp_path, capsys):
    engine, seen = _engine(), []
    StepLog(
        engine,
        every=2,
        folder=tmp_path,
        to=("console", "jsonl", lambda step, figures: seen.append((step, figures))),
        tokens_per_sample=8,
        peak_tflop_per_s=100.0,
    )
    losses = []
    for step in range(4):
        batch = tuple(each[: 2 + step % 2 * 2] for each in mlp_batch(4))
        losses.append(engine.step(batch, update=True).item())
    engine.step(mlp_batch(4), update=False)  # no update: no line
    assert [step for step, _ in seen] == [2, 4]
    figures = seen[1][1]
    assert figures["loss"] == pytest.approx((2 * losses[2] + 4 * losses[3]) / 6, rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(engine.grad_norm.item())
    assert figures["lr"] == 1e-3
    assert figures["samples_per_s"] * figures["step_s"] == pytest.approx(3)
    assert figures["tokens_per_s"] == pytest.approx(8 * figures["samples_per_s"])
    assert figures["mfu"] == pytest.approx(figures["model_tflop_per_s"] / 100)
    assert figures["memory_gb"] > 0.01
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[1]["loss"] == figures["loss"]
    assert capsys.readouterr().out.startswith("step 2  loss ")


def test_a_line_after_a_load_is_of_the_steps_since(tmp_path):
    """Forward, as `engine.resume` after the log was made, and back."""
    engine, seen = _engine(), []
    for _ in range(3):
        engine.step(mlp_batch(4))
    engine.save(tmp_path)
    engine.wait_for_save()
    again = _engine()
    StepLog(again, every=2, to=(lambda step, figures: seen.append((step, figures)),))
    for first in (3, 3):
        again.load(tmp_path)
        losses = [again.step(mlp_batch(4)).item() for _ in range(2)]
        step, figures = seen.pop()
        assert (seen, step) == ([], first + 2)
        assert figures["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert figures["samples_per_s"] * figures["step_s"] == pytest.approx(4)
        again.step(mlp_batch(4))  # a line is begun


def test_flop_are_those_of_products_three_times_over():
    """Forward, input gradient and weight gradient: but none for the first input."""
    from planner.language.ops.flops import model_flop

    graph = capture_tiny("mlp")
    weights = [meta.shape for meta in graph.params if len(meta.shape) == 2]
    products = sum(2 * rows * columns for rows, columns in weights)
    first = 2 * weights[0][0] * weights[0][1]
    found = model_flop(graph, 4) / 4
    assert 3 * products - first <= found < 1.1 * (3 * products - first)


def test_a_log_that_can_not_be_written_is_refused_in_one_line(monkeypatch):
    engine = _engine()
    with pytest.raises(PlanError, match="to='paper' is no log; give console, jsonl"):
        StepLog(engine, to=("paper",))
    with pytest.raises(PlanError, match="give folder="):
        StepLog(engine, to=("jsonl",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PlanError, match="pip install wandb"):
        StepLog(engine, to=("wandb",))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PlanError, match="pip install tensorboard"):
        StepLog(engine, folder=".", to=("tensorboard",))


def test_memory_of_a_device_is_counted_from_the_log_s_beginning(monkeypatch):
    """With what streams still need, and without what building the model took."""
    called = []
    module = SimpleNamespace(
        reset_peak_memory_stats=called.append,
        memory_stats=lambda device: {"active_bytes.all.peak": 3e9, "allocated_bytes.all.peak": 1e9},
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("cuda", 0)
    step_log._reset_peak(device)
    assert called == [device]
    assert step_log._peak_bytes(device) == 3e9
