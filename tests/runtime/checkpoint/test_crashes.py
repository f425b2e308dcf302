"""Runs that end in the middle of a save, and at their own end with a save under way."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.runtime.checkpoint.folder import checkpoints_in, read_manifest, what_is_wrong
from planner.runtime.checkpoint.storage import file_checksum
from planner.runtime.start.launch import launch
from tests import spawn
from tests.builders import gpt_batch
from tests.runtime.checkpoint.scenarios import make_engine
from tests.runtime.scenarios import build, capture

MOST_STEPS = 400


def save_without_end(plan, folder: str) -> None:
    """Go on from the newest checkpoint, and save each step."""
    engine = make_engine("gpt", plan, "adamw")
    if any(Path(folder).glob("0*")):
        engine.load(folder)
    while engine.steps < MOST_STEPS:
        engine.step(gpt_batch(plan.global_batch))
        engine.save(folder, keep=2)


def kill_while_saving(plan, folder: Path, wait_s: float) -> None:
    """Start the plan's ranks, let them save, and kill them all at once."""
    known = {path.name for path in folder.glob("0*")}
    with tempfile.TemporaryDirectory() as store:
        queue = spawn.context.SimpleQueue()  # held until the ranks have opened it
        ranks = spawn.start_ranks(
            save_without_end, 2, plan, str(folder),
            queue=queue, store=Path(store) / "store",
        )  # fmt: skip
        try:

            def has_more() -> bool:
                assert all(rank.is_alive() for rank in ranks), "a rank ended by itself"
                return not {path.name for path in folder.glob("0*")} <= known

            spawn.until(has_more, lambda: "no checkpoint came", each_s=0.001)
            time.sleep(wait_s)
        finally:
            for rank in ranks:
                os.kill(rank.pid, signal.SIGKILL)
            for rank in ranks:
                rank.join()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_random_moments(tmp_path):
    """Twelve times: what is under a checkpoint's name is whole, and training goes on from it."""
    plan = default_plan(capture("gpt", torch.float64), dp=2, zero_stage=1)
    draw = random.Random(0)
    steps, cut_off = [], 0
    for _ in range(12):
        kill_while_saving(plan, tmp_path, draw.uniform(0, 0.3))
        cut_off += any(tmp_path.glob(".saving-*"))
        found = checkpoints_in(tmp_path)
        for checkpoint in found:
            files = read_manifest(checkpoint).files
            assert what_is_wrong(checkpoint, files.items(), file_checksum) == ""
        steps.append(read_manifest(found[0]).step)
    assert steps == sorted(set(steps)), "each run went on from where the last one was"
    assert cut_off > 0, "none was killed in the middle of a save"
    single = default_plan(capture("gpt", torch.float64), microbatch_size=2)
    assert single.global_batch == plan.global_batch
    alone = make_engine("gpt", single, "adamw")
    for _ in range(steps[-1]):
        alone.step(gpt_batch(plan.global_batch))
    again = make_engine("gpt", single, "adamw", seed=1)
    again.load(tmp_path)
    expected = alone.full_state_dict()
    for name, tensor in again.full_state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)


SCRIPT = """
import sys

import torch

import planner
from tests.builders import PlainGPT, gpt_batch

engine = planner.apply("plan.json", PlainGPT())
for step in range(3):
    engine.step(gpt_batch(engine.plan.global_batch))
engine.save("run")
if {ends_by_exit}:
    sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends_by_exit", [False, True])
def test_a_script_may_end_while_its_last_save_is_under_way(tmp_path, monkeypatch, ends_by_exit):
    """Either way; the threads that copy to and from the host do not keep it from ending."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[3]), "")))
    plan = default_plan(capture("gpt"), dp=2)
    save_plan(plan.model_copy(update={"optimizer_on_host": True}), "plan.json")
    Path("script.py").write_text(SCRIPT.format(ends_by_exit=ends_by_exit))
    assert launch("plan.json", "script.py", device="cpu") == 0
    engine = planner.apply(default_plan(capture("gpt")), build("gpt")[1])
    assert engine.load("run").step == 3
