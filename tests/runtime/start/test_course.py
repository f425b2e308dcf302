"""X15, the life of a run: killed ranks start again from the newest whole checkpoint.

Losses are compared with those of a run that nothing disturbed: under one plan they are equal to
the last bit, whatever was killed when.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, save_plan
from planner.runtime.start.course import Course, Keeping
from planner.runtime.start.launch import launch
from tests.builders import VOCABULARY, gpt_batch
from tests.runtime.scenarios import build, capture
from tests.spawn import is_running

ROOT = Path(__file__).parents[3]
KILLED = (
    "planner: rank 1 was ended by SIGKILL: by the kernel where the host's memory is full "
    "(`dmesg` says so), or by somebody"
)

TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import planner
import planner.capture
from tests import captures
from tests.builders import VOCABULARY, PlainGPT, gpt_batch

def batch_of(engine):
    batch = gpt_batch(engine.plan.global_batch)
    return {name: (tokens + engine.steps) % VOCABULARY for name, tokens in batch.items()}

planner.capture.capture_module = captures.capture_module  # exported once for all runs
torch.set_default_dtype(torch.float64)
rank, steps, wait_s, dies = os.environ["RANK"], int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
Path(f"pid-{rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
model = PlainGPT()
engine = planner.apply("plan.json", model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
Path(f"loading-{rank}").touch()
torch.manual_seed(1 + int(rank))
engine.resume()
if dies == "hangs" and rank == "1":
    (stage,) = engine.stages.values()
    forward = stage.forward
    def asleep(*inputs, **settings):
        if engine.steps == 3 and not Path("hung").exists():
            Path("hung").touch()
            time.sleep(1000)
        return forward(*inputs, **settings)
    stage.forward = asleep
while engine.steps < steps:
    drawn = torch.rand(()).item()
    loss = engine.step(batch_of(engine)).item()
    with open(f"log-{rank}", "a") as log:
        log.write(json.dumps([engine.steps, loss, drawn, engine.plan.world_size]) + "\\n")
    engine.keep()
    time.sleep(wait_s)
    if dies == "oom" and engine.steps == 3 and engine.plan.zero_stage == 0:
        engine.wait_for_save()
        torch.empty(2**58, dtype=torch.uint8)
    damage = dies.removeprefix("dies, ")
    if damage != dies and rank == "1" and engine.steps == 3 and not Path("killed").exists():
        engine.wait_for_save()
        *_, before, newest = sorted(Path("run").glob("0*/__1_0.distcp"))
        data = bytearray(newest.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 4
        elif damage == "truncated":
            del data[-100:]
        elif damage == "mixed":
            data = before.read_bytes()
        newest.write_bytes(data)
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""

RUN = """
import sys
from pathlib import Path
from planner.runtime.start.course import Keeping
from planner.runtime.start.launch import launch
restarts, *args = sys.argv[1:]


def replan(counts, limit):
    import torch
    from planner.language.lowering.defaults import default_plan
    from tests.runtime.scenarios import capture

    return default_plan(capture("gpt", torch.float64), dp=2, zero_stage=1)


keeping = Keeping(
    folder=Path("run"),
    save_every=1,
    max_restarts=int(restarts),
    replan=replan if args[-1] == "oom" else None,
    replans_on_oom=True,
)
sys.exit(launch("plan.json", "train.py", args, "cpu", keeping=keeping))
"""


def begin(
    folder: Path, restarts: int, steps: int, wait_s: float = 0.0, *, dies: str = ""
) -> subprocess.Popen[str]:
    """Start a kept run in a folder with plan.json."""
    (folder / "train.py").write_text(TRAIN)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(restarts), str(steps), str(wait_s), dies],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stderr=subprocess.PIPE,
    )


def curve(folder: Path, rank: int = 0) -> list[list[float]]:
    """The last that a rank noted of each step: its loss, a random number, the number of ranks."""
    found = {}
    for line in (folder / f"log-{rank}").read_text().splitlines():
        step, *values = json.loads(line)
        found[step] = values
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[step] for step in sorted(found)]


def losses_alone(plan: Plan, steps: int) -> list[float]:
    """One process on the whole batch."""
    torch.set_default_dtype(torch.float64)
    try:
        module = build("gpt")[1]
        single = default_plan(capture("gpt", torch.float64), microbatch_size=plan.global_batch)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        engine = planner.apply(single, module, optimizer=optimizer)
        batch = gpt_batch(plan.global_batch)
        return [
            engine.step({k: (v + step) % VOCABULARY for k, v in batch.items()}).item()
            for step in range(steps)
        ]
    finally:
        torch.set_default_dtype(torch.float32)


def assert_nothing_left(folder: Path) -> None:
    assert not [pid for pid in map(pid_of, folder.glob("pid-*")) if is_running(pid)]
    assert not list((folder / "run").glob(".*"))


def pid_of(path: Path) -> int:
    return int(path.read_text())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("flipped", "has another checksum"),
        pytest.param("truncated", r"has \d+ bytes of \d+", marks=pytest.mark.slow),
        pytest.param("mixed", "has another checksum", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_starts_again_where_a_checkpoint_is_whole(
    tmp_path, monkeypatch, capfd, forked_ranks, damage, says
):
    """The newest checkpoint has a flipped bit, an end cut off, or the file of another when the
    ranks start again: the one before it is taken, and the curve is that of one process."""
    plan = default_plan(capture("gpt", torch.float64), dp=2)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    keeping = Keeping(folder=Path("run"), save_every=1, max_restarts=1)
    code = launch("plan.json", "train.py", ["5", "0", f"dies, {damage}"], "cpu", keeping=keeping)
    told = capfd.readouterr().err
    assert code == 0, told
    assert KILLED in told
    assert re.search(r"planner: restart 1 of 1, from 00000\d-step-3\n", told)
    assert re.search(rf"step-3: .* {says}.*; taking the checkpoint before it", told)
    assert "Traceback" not in told
    found = [loss for loss, *_ in curve(tmp_path)]
    torch.testing.assert_close(found, losses_alone(plan, 5), rtol=1e-12, atol=0)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_rank_without_memory_tells_what_it_held_and_a_smaller_plan_goes_on(tmp_path):
    """The host is the device here, and its allocator refuses what no machine has."""
    plan = default_plan(capture("gpt", torch.float64), dp=2)
    save_plan(plan, tmp_path / "plan.json")
    process = begin(tmp_path, restarts=1, steps=5, dies="oom")
    try:
        _, told = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert re.search(r"planner: rank \d ran out of memory: .*can't allocate memory", told)
    for category in ("parameters", "gradients", "optimizer", "activations and all else"):
        assert re.search(rf"  {category} +- +[\d.]+ [KMGT]iB\n", told), told
    assert "the plan is pp=1 dp=2 cp=1 tp=1 zero_stage=1" in told
    found = [loss for loss, *_ in curve(tmp_path)]
    torch.testing.assert_close(found, losses_alone(plan, 5), rtol=1e-9, atol=0)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_rank_that_sleeps_in_a_job_is_told_of_and_starts_again(tmp_path, monkeypatch):
    """For good, in code of the script's; the launcher is given a short time to end it."""
    monkeypatch.setenv("PLANNER_STALL_S", "3")
    monkeypatch.setenv("PLANNER_STALL_ENDS", "3")
    plan = default_plan(capture("gpt", torch.float64), pp=2)
    save_plan(plan, tmp_path / "plan.json")
    process = begin(tmp_path, restarts=1, steps=6, dies="hangs")
    try:
        _, told = process.communicate(timeout=250)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert told.count("planner: nothing has moved for 3 s; the ranks are in") == 1
    assert "all others wait, in the end, for rank 1 (job 1F0 (forward of stage 1" in told
    assert told.count("planner: stacks of rank 0") == told.count("planner: stacks of rank 1") == 1
    assert "in asleep" in told  # the line of the script
    assert re.search(r"planner: rank \d has not moved for \d+ s: job", told)
    assert re.search(r"planner: restart 1 of 1, from 00000\d-step-[23]\n", told)
    found = [loss for loss, *_ in curve(tmp_path)]
    torch.testing.assert_close(found, losses_alone(plan, 6), rtol=1e-12, atol=0)
    assert_nothing_left(tmp_path)


def kill_one(folder: Path, when: str, draw: random.Random, known: int) -> bool:
    """Kill a random rank with -9: during a `load`, a `save`, or anywhere (`step`) after `known`
    lines of the log; whether the moment came before the run was over.
    """

    def has_come() -> bool:
        if when == "load":
            return any(folder.glob("loading-*"))
        lines = (folder / "log-0").read_text().count("\n") if (folder / "log-0").exists() else 0
        return lines > known and (when == "step" or any((folder / "run").glob(".saving-*")))

    until = time.monotonic() + 90
    while not has_come():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    time.sleep(draw.uniform(0, {"load": 0.1, "save": 0.02, "step": 1.0}[when]))
    for path in folder.glob("loading-*"):
        path.unlink()
    try:
        os.kill(pid_of(folder / f"pid-{draw.randrange(2)}"), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changes", [{"pp": 2}, {"dp": 2, "zero_stage": 1}], ids=["pp2", "zero"])
def test_thirty_kills_change_no_bit_of_the_curve(tmp_path, changes):
    """Fifteen of each plan, five while saving, five while loading, five at any moment."""
    plan = default_plan(capture("gpt", torch.float64), **changes)
    draw = random.Random(len(changes))
    moments = ["load", "save", "step"] * 5
    steps = 40
    curves = []
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        save_plan(plan, folder / "plan.json")
        process = begin(folder, restarts=20, steps=steps, wait_s=0.1 * (name == "disturbed"))
        kills = 0
        try:
            if name == "disturbed":
                known = 0
                for when in moments:
                    kills += kill_one(folder, when, draw, known)
                    log = folder / "log-0"
                    known = log.read_text().count("\n") if log.exists() else 0
            _, told = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 0, told
        assert told.count("planner: restart") == kills, told
        assert_nothing_left(folder)
        curves.append([curve(folder, rank) for rank in range(2)])
    assert kills == len(moments), "the run was over before all kills"
    assert curves[0] == curves[1]


@dataclass
class Died:
    """A rank's failure as torchelastic has it."""

    exitcode: int
    timestamp: int = 0


def course_of(folder: Path, **settings) -> Course:
    plan = default_plan(capture("gpt"), dp=2)
    save_plan(plan, folder / "plan.json")
    (folder / "run").mkdir()
    keeping = Keeping(folder=folder / "run", **settings)
    return Course(
        plan=folder / "plan.json", failure=folder / "failure", ranks_here=2, keeping=keeping
    )


@pytest.mark.parametrize(
    ("code", "says", "kind"),
    [
        (-15, "rank 0 was ended by SIGTERM: by what started it, or by somebody", "killed"),
        (-11, "rank 0 died by SIGSEGV and said nothing", "peer"),
        (7, "rank 0 died with exit code 7 and said nothing", "peer"),
    ],
)
def test_how_a_rank_ended_that_said_nothing(tmp_path, code, says, kind):
    course = course_of(tmp_path)
    course.goes_on({0: Died(code)})
    assert course.failure is not None
    assert (course.failure.text, course.failure.kind) == (f"planner: {says}", kind)


def leave(folder: Path, kind: str, **more) -> None:
    failure = {"kind": kind, "rank": 0, "code": 1, "text": f"planner: {kind}", **more}
    (folder / "failure").write_text(json.dumps(failure))


def test_the_cause_is_the_rank_that_the_agent_did_not_end(tmp_path):
    course = course_of(tmp_path)
    assert course.goes_on({0: Died(-15), 1: Died(-9)})
    assert course.failure is not None
    assert course.failure.text == KILLED


def test_what_would_only_come_again_ends_the_run(tmp_path, capsys):
    """A mistake of the user's, a NaN and, at the second time from one place, an exception; while a
    rank that was killed is the cause whatever its peers say, and torn notes are none."""
    course = course_of(tmp_path)
    for kind in ("user", "values", "library", "memory"):
        leave(tmp_path, kind)
        assert not course.goes_on({0: Died(1)})
    leave(tmp_path, "script")
    assert course.goes_on({0: Died(1)})
    course.begin_again(1, 3)
    assert "from the beginning: there is no checkpoint yet" in capsys.readouterr().err
    leave(tmp_path, "script")
    assert not course.goes_on({0: Died(1)})
    (tmp_path / "run" / "000001-step-7").mkdir()
    assert course.goes_on({0: Died(1)})  # it came further
    leave(tmp_path, "peer")
    assert course.goes_on({0: Died(1), 1: Died(-9)})
    assert course.failure.text == KILLED
    (tmp_path / "failure").write_text('{"kind": "us')
    assert course.goes_on({1: Died(-9)})
    course.begin_again(2, 3)
    told = capsys.readouterr().err
    assert KILLED in told
    assert "restart 2 of 3, from 000001-step-7" in told
    assert not (tmp_path / "failure").exists()


def test_after_a_lack_of_memory_a_plan_for_less_is_searched(tmp_path):
    """Nine tenths of what the plan that did not fit was predicted to need; once for each lack, and
    again for another launcher."""
    asked = []

    def replan(counts, limit):
        asked.append((list(counts), limit))
        found = default_plan(capture("gpt"), dp=2, zero_stage=1)
        estimate = {
            "step_s": 1.0, "peak_bytes": 1000.0, "time": {}, "memory": [{"context_bytes": 200.0}],
            "source": "",
        }  # fmt: skip
        return found.model_copy(update={"estimate": estimate})

    course = course_of(tmp_path, replan=replan, replans_on_oom=True)
    assert course.plan_for(2) == (2, tmp_path / "plan.json")
    leave(tmp_path, "memory")
    assert not course.goes_on({0: Died(1)})  # nothing is known of what it needed
    leave(tmp_path, "memory", peak_bytes=2000)
    assert course.goes_on({0: Died(1)})
    count, path = course.plan_for(2)
    assert (count, asked) == (2, [([2], 1800)])
    assert course.plan_for(2) == (count, path)
    assert asked == [([2], 1800)]
    leave(tmp_path, "memory", peak_bytes=2000)
    assert course.goes_on({0: Died(1)})
    course.plan_for(2)
    assert asked[1:] == [([2], 920)]  # of the prediction, and all of the context
    with pytest.raises(PlanError, match="`save_every` 0 was given"):
        Keeping(folder=tmp_path, save_every=0)
