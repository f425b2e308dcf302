"""Trials of several plans: turns, failures of single plans, and what is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs import trials
from planner.runtime.proofs.trials import TrialSettings, run_trials
from tests.spawn import is_running

MODEL = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def model():
    return Net()


def batch(size):
    if "LOCAL_RANK" in os.environ:
        with (Path(__file__).parent / "pids").open("a") as pids:
            pids.write(f"{os.getpid()}\\n")
    if size == 6 and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if size == 10 and os.environ.get("RANK") == "0":
        raise MemoryError("out of memory in batch()\\nwith more lines")
    if size == 12:
        time.sleep(1000)
    return (torch.randn(size, 8),)
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """The model file; a turn ends after twenty times its predicted steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "_LONGEST_START_S", 0.0)
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def planned(graph, batch: int, step_s: float = 1.0, **degrees: int):
    """A plan of a global batch, which is said to take so many seconds."""
    made = default_plan(graph, microbatch_size=1, num_microbatches=batch, **degrees)
    told = {"step_s": step_s, "time": {}, "peak_bytes": 0, "memory": [{}], "source": "test"}
    return made.model_copy(update={"estimate": told})


def run(model: Path, graph, *plans, turns: int):
    """Run plans; return their trials, what was told of the progress, and all processes' ids."""
    told: list[float] = []
    found = run_trials(
        plans,
        graph,
        model,
        device="cpu",
        settings=TrialSettings(steps=2, turns=turns),
        progress=lambda part, _: told.append(part),
    )
    return found, told, list(map(int, (model.parent / "pids").read_text().split()))


def test_a_plan_that_fails_is_left_out(model, forked_ranks):
    """On one rank: the first plan raises, the other has its turn in a process of its own."""
    graph = load_graph(model)
    (failed, ran), told, pids = run(model, graph, planned(graph, 10), planned(graph, 2), turns=1)
    assert failed.failure == "rank 0: MemoryError: out of memory in batch()"
    assert len(ran.turns_s) == 1
    assert 0 < ran.step_s < 20
    assert told[0] == 0.0
    assert told == sorted(told)
    assert len(set(pids)) == 2
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_plans_take_turns_and_the_cause_of_a_failure_is_told(model):
    """Four plans: one runs, one loses a rank, one raises, one never ends.

    Each turn is processes of its own, of which none is left.
    """
    graph = load_graph(model)
    plans = [
        planned(graph, 2, dp=2),
        planned(graph, 6, pp=2),
        planned(graph, 10, pp=2),
        planned(graph, 12, pp=2, step_s=0.02),
    ]
    found, _, pids = run(model, graph, *plans, turns=2)
    assert [len(trial.turns_s) for trial in found] == [2, 0, 0, 0]
    assert found[1].failure == "rank 1 was ended by SIGKILL (often: no memory left)"
    assert found[2].failure == "rank 0: MemoryError: out of memory in batch()"
    assert found[3].failure.endswith("had not ended its turn after 2 s")
    assert len(set(pids)) == 2 * (2 + 3), "two turns of the one that runs, one of each that fails"
    assert not any(map(is_running, pids))


INTERRUPTED = """
import sys
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.trials import run_trials

graph = load_graph(sys.argv[1])
plan = default_plan(graph, microbatch_size=1, num_microbatches=12, pp=2)
run_trials([plan], graph, sys.argv[1], device="cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_interrupt_ends_all_ranks(name, model, tmp_path):
    """G15: the processes of a turn end with their rank, and that with the launcher."""
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(model)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # what is killed outright cannot clean up
        stderr=subprocess.DEVNULL,
    )
    pids = tmp_path / "pids"
    until = time.monotonic() + 120
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < until
        assert run.poll() is None
        time.sleep(0.1)
    run.send_signal(signal.Signals[name])
    assert run.wait(timeout=60) != 0
    until = time.monotonic() + 10
    while any(map(is_running, map(int, pids.read_text().split()))):
        assert time.monotonic() < until, "a process was left"
        time.sleep(0.1)
