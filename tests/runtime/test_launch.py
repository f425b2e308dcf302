"""`launch` when something goes wrong: a rank fails, the run is interrupted, or it is refused.

P8, P10 (refused before launch), G14 (an exception ends the run), G15 (no process left), V1, V7
(groups, control group), V11. What goes right is tested with the command, in `tests/cli`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import PlanError, PlannerError, ScheduleError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.runtime.process.environment import LAUNCHER
from planner.runtime.start.launch import launch
from tests.runtime.scenarios import capture
from tests.spawn import PATIENCE_S, until

ROOT = Path(__file__).parents[2]

TRAIN = """
import os, sys, time
mode = sys.argv[2]
if mode == "asleep":
    print("step 0", flush=True)
    time.sleep(100)
import torch
import planner
import planner.capture
from planner.errors import PlannerError
from tests import captures
from tests.builders import PlainGPT, gpt_batch

planner.capture.capture_module = captures.capture_module  # exported once for all runs

torch.manual_seed(int(os.environ["RANK"]))  # the engine must make the ranks' weights agree
model = PlainGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if mode in ("absent", "broken"):
    import torch.distributed as dist
    def toy(store, rank, size, timeout):
        if rank == 1:
            raise RuntimeError("the toy's driver is too old")
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if mode == "broken" or os.environ["RANK"] == "0":
        dist.Backend.register_backend("toy", toy, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "toy"
try:
    engine = planner.apply(sys.argv[1], model, optimizer=optimizer)
except PlannerError as error:
    with open(f"told-{os.environ['RANK']}", "w") as told:
        told.write(str(error))
    time.sleep(2)  # so that the other one has told, too, when the launcher ends it
    raise
if mode == "fault" and 1 in engine.stages:
    stage, forward, calls = engine.stages[1], engine.stages[1].forward, []
    def failing(*inputs, **settings):
        if not calls:
            time.sleep(4)
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("deliberate")
        return forward(*inputs, **settings)
    stage.forward = failing
short = mode == "short" and os.environ["RANK"] == "0"
for step in range(10_000 if mode == "endless" else 3 - short):
    loss = engine.step(gpt_batch(engine.plan.global_batch))
    if mode == "vanish" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    print(f"rank {os.environ['RANK']} step {step} loss {loss.item():.9f}\\n", end="", flush=True)
if mode == "alone" and os.environ["RANK"] == "1":
    engine.evaluate(gpt_batch(engine.plan.global_batch))
"""

RUN = """
import sys
from planner.runtime.start.launch import launch
sys.exit(launch(sys.argv[1], sys.argv[2], sys.argv[1:2] + sys.argv[3:], "cpu"))
"""

COMMAND = """
import sys
import cli
plan, script, mode = sys.argv[1:]
sys.argv[1:] = ["launch", "--device", "cpu", plan, script, plan, mode]
cli.main()
"""


@pytest.fixture
def plan_path(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(default_plan(capture("gpt"), pp=2), path)
    return path


@pytest.fixture
def start(plan_path, tmp_path):
    """Start a launcher in a session of its own; what is left of it is killed afterwards."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    started = []

    def start(mode: str, run: str = RUN) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", run, str(plan_path), str(script), mode]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        for rank in _ranks_left(tmp_path):  # they would hold the pipes open
            os.kill(rank, signal.SIGKILL)
        process.communicate()


def _ranks_left(tmp_path: Path) -> list[int]:
    """Processes that still run this test's script."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "planner.worker" in line and str(tmp_path) in line:
            found.append(int(entry.parent.name))
    return found


def test_a_stall_and_an_exception_are_told_once(
    plan_path, tmp_path, monkeypatch, capfd, forked_ranks
):
    """G14: stage 1 is late with microbatch 0, which is told with what every rank is in, and fails
    at microbatch 2, which ends the run: the traceback once, from the user's script on."""
    monkeypatch.setenv("PLANNER_STALL_S", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    code = launch(plan_path, "train.py", [str(plan_path), "fault"], "cpu")
    err = capfd.readouterr().err
    assert err.count("planner: nothing has moved for 2 s; the ranks are in") == 1
    assert re.search(
        r"rank 0: job 0\S+ \(.*\), waiting for the gradient of \S+ \[1, 16, 32\] of microbatch 0 "
        r"from rank 1 \(pp rank 1\)",
        err,
    )
    assert re.search(r"rank 1: job 1F0 \(forward of stage 1, microbatch 0\)", err)
    assert "all others wait, in the end, for rank 1 (job 1F0 (forward of stage 1" in err
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert err.count("RuntimeError: deliberate") == 1
    assert "planner: rank 1 failed" in err
    assert "in job 1F2 (forward of stage 1, microbatch 2) on pp rank 1" in err
    assert "runpy" not in err[err.index("planner: rank 1 failed") :]
    assert err.count("planner: stacks of rank 0") == err.count("planner: stacks of rank 1") == 1


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("short", r"^rank 0's script had ended after 2 steps, and rank 1 was in step 3; every"),
        ("alone", r"^rank 0's script had ended after 3 steps, and rank 1 waited for it behind"),
    ],
)
def test_a_script_that_ends_before_the_others_is_told(
    plan_path, tmp_path, monkeypatch, forked_ranks, mode, told
):
    """Its loader was shorter, or a call was of one rank alone; the backend says that a connection
    was closed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    with pytest.raises(PlannerError, match=told) as caught:
        launch(plan_path, "train.py", [str(plan_path), mode], "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_backend_that_one_rank_lacks_is_told_by_all(start, tmp_path):
    """V7: the control group is there without the main backend, and all ranks end by themselves."""
    process = start("absent", COMMAND)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = err.strip().splitlines()
    assert re.search("rank 1: ranks on cpu talk through toy, .* built without; install a Py", line)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert line == f"planner: {told[0]}".replace("`device`", "--device")
    until(lambda: not _ranks_left(tmp_path), each_s=0.1)


@pytest.mark.slow
def test_a_backend_that_does_not_start_on_a_rank_is_a_line(start, tmp_path):
    """V7: the others, which wait for it, are ended."""
    process = start("broken", COMMAND)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = err.strip().splitlines()
    assert re.search(r"rank 1 on cpu can't start toy, .* \(the toy's driver is too old\)", line)
    until(lambda: not _ranks_left(tmp_path), each_s=0.1)


def test_a_rank_that_vanishes_ends_the_run(start, tmp_path):
    process = start("vanish")
    process.communicate(timeout=120)
    assert process.returncode == 1
    until(lambda: not _ranks_left(tmp_path), each_s=0.1)


@pytest.mark.parametrize(
    ("sent", "mode"),
    [(signal.SIGINT, "endless"), (signal.SIGTERM, "asleep"), (signal.SIGKILL, "asleep")],
)
def test_no_process_survives_the_launcher(start, tmp_path, sent, mode):
    """G15: interrupted, terminated, or killed outright.

    An interrupt meets Python's own handler in the ranks, which are training then; the other
    signals end a process whatever it does.
    """
    process = start(mode)
    assert "step 0" in process.stdout.readline()
    process.send_signal(sent)
    process.wait(timeout=PATIENCE_S)
    assert process.returncode == (-9 if sent == signal.SIGKILL else 128 + sent)
    until(lambda: not _ranks_left(tmp_path), each_s=0.1)
    assert process.communicate()[1] == ""


def test_a_rank_that_comes_up_after_its_launcher_has_gone_ends(tmp_path):
    """G15: the kernel only tells of a parent that dies from then on."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    gone = {**os.environ, "PYTHONPATH": str(ROOT), LAUNCHER: str(2**22 + 1)}
    rank = [sys.executable, "-m", "planner.worker", str(script)]
    ended = subprocess.run(rank, env=gone, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_refused_before_any_process_starts(plan_path, tmp_path, monkeypatch):
    """P8, P10, V11: fewer microbatches than stages, an unknown schedule, no script."""
    monkeypatch.setattr(
        "planner.runtime.start.launch.run_workers", lambda *args, **kwargs: pytest.fail("started")
    )
    script = tmp_path / "train.py"
    script.write_text("")
    plan = default_plan(capture("gpt"), pp=2)

    def launched(error: type[PlannerError], match: str, **changes) -> None:
        save_plan(plan.model_copy(update=changes), plan_path)
        with pytest.raises(error, match=match):
            launch(plan_path, script, device="cpu")

    launched(ScheduleError, "num_microbatches=1 is fewer than pp=2", num_microbatches=1)
    launched(ScheduleError, "schedule 'gpipe2' is unknown; .*valid names", schedule="gpipe2")
    with pytest.raises(PlanError, match="no script"):
        launch(plan_path, tmp_path / "absent.py", device="cpu")
    with pytest.raises(PlanError, match="no plan file"):
        launch(tmp_path / "absent.json", script, device="cpu")


def test_the_wrong_number_of_ranks_is_refused():
    """V11: a plan for 2 ranks in a lone process is an error, never another plan."""
    import planner
    from tests.builders import PlainGPT

    with pytest.raises(PlanError, match=r"plan is for 2 ranks .* lone process"):
        planner.apply(default_plan(capture("gpt"), pp=2), PlainGPT())
