"""X15: runs that go on under a plan that the real search finds, by the commands that users give.

Losses are those of plain PyTorch on the whole batch, within rounding of fp32.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from planner.language.plan import load_plan
from tests.builders import PlainGPT, gpt_batch
from tests.runtime.start.test_course import ROOT, curve
from tests.spawn import free_port, until

MODEL = """
from tests.builders import PlainGPT, gpt_batch
def model():
    return PlainGPT()
def batch(size):
    return gpt_batch(size)
"""

TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
import planner
import model
rank = os.environ["RANK"]
torch.manual_seed(0)
network = model.model()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
engine = planner.apply("plan.json", network, optimizer=optimizer)
engine.resume()
while engine.steps < int(sys.argv[1]):
    loss = engine.step(model.batch(8)).item()
    with open(f"log-{rank}", "a") as log:
        log.write(json.dumps([engine.steps, loss, engine.plan.world_size]) + "\\n")
    engine.keep()
    time.sleep(float(sys.argv[2]))
    if len(sys.argv) > 3 and engine.steps == 3 and not Path("run/memory-limit").exists():
        engine.wait_for_save()
        torch.empty(2**58, dtype=torch.uint8)
"""


def begin(folder: Path, *command: str, log: str = "log") -> subprocess.Popen[str]:
    """Start a command of the shell; what it prints goes to a file."""
    with (folder / log).open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-c", "import cli; cli.main()", *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")},
            text=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def folder(tmp_path):
    """An empty folder with a model, a script and a plan of two replicas, searched."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    wanted = "--gpus 2 --dp 2 --zero 0 --global-batch 8 --profile h100-sxm5-80gb"
    assert begin(tmp_path, "search", "model.py", *wanted.split()).wait(timeout=200) == 0
    return tmp_path


def assert_as_alone(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    module, batch, expected = PlainGPT(), gpt_batch(8), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = [loss for loss, _ in curve(folder)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_for_less_memory_is_searched(folder):
    keep = ["--device", "cpu", "--keep", "run", "--save-every", "1", "--on-oom", "replan"]
    process = begin(folder, "launch", *keep, "plan.json", "train.py", "6", "0", "oom")
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    told = (folder / "log").read_text()
    assert code == 0, told
    assert re.search(r"planner: rank \d ran out of memory", told)
    assert told.count("planner: restart 1 of 3, from 000003-step-3") == 1
    first = load_plan(folder / "plan.json").estimate
    (made,) = (folder / "run").glob("plan-2-ranks-*-bytes-of-*.json")
    second = load_plan(made).estimate
    context = first["memory"][0]["context_bytes"]
    assert second["peak_bytes"] - context <= 0.9 * (first["peak_bytes"] - context)
    assert_as_alone(folder, 6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_for_the_node_that_is_left_is_searched(folder):
    where = f"--num-nodes 2 --rendezvous localhost:{free_port()} --elastic 1"
    command = f"launch --device cpu --keep run --save-every 1 {where} plan.json train.py 12 0.5"
    nodes = [begin(folder, *command.split(), log="node-0")]
    log = folder / "log-0"
    try:
        time.sleep(3)  # the first has the store of the rendezvous
        nodes.append(begin(folder, *command.split(), log="node-1"))
        until(
            lambda: log.exists() and log.read_text().count("\n") >= 3,
            (folder / "node-0").read_text,
            each_s=0.1,
        )
        os.kill(nodes[1].pid, signal.SIGKILL)  # the kernel ends its rank
        code = nodes[0].wait(timeout=300)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    told = (folder / "node-0").read_text()
    assert code == 0, told
    (made,) = (folder / "run").glob("plan-1-ranks-of-*.json")
    assert load_plan(made).world_size == 1
    sizes = [json.loads(line)[2] for line in log.read_text().splitlines()]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {1, 2}
    assert_as_alone(folder, 12)
