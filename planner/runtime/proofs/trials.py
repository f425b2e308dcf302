"""Trials: a few steps of several plans of a model on this machine, and what they took.

    turn 0:  plan A, plan B, plan C      turn 1:  plan A, plan B, plan C      ...

A machine's speed drifts over minutes, so plans take turns and each drift falls on all of them.
A plan's turn runs in processes that have run nothing else, as when a user launches it: each rank
has loaded torch once and forks a process for every turn. (After many engines a process is slower
by what they left in its memory.)

Ranks meet through files in a folder of the run: a turn's rendezvous, what each rank found, and
`failed-PLAN-RANK` of a rank whose process failed, died or took too long. The others end theirs when
they see one, and the plan has no further turns.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from planner.errors import PlannerError
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.plan import Plan, load_plan, save_plan
from planner.runtime.process.host.lifetime import die_with
from planner.runtime.start.workers import run_workers

WARM_UP_STEPS = 3
"""Steps ahead of those that are timed: in them a process takes the memory it needs."""

START_S = 10.0
"""About how long ranks take to come up; and what a turn takes beside its steps is a third."""

_LONGEST_START_S = 120.0
_MOST_TIMES_SLOWER = 20.0
"""A turn is ended after the longest start and so many times its predicted steps."""

_POLL_S = 0.05
_MAX_GRAD_NORM = 1.0

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """How plans are tried."""

    steps: int = 5
    """Timed steps of a turn."""
    turns: int = 3
    """Turns of each plan."""
    clips_gradients: bool = False
    """Whether a step clips gradients by their norm."""

    def about_s(self, steps_s: Sequence[float]) -> float:
        """Return about how long trials of plans take, whose steps take so many seconds."""
        turn_s = sum(START_S / 3 + (WARM_UP_STEPS + self.steps) * step_s for step_s in steps_s)
        return START_S + self.turns * turn_s

    def limit_s(self, step_s: float) -> float:
        """Return after how many seconds a turn of a plan is ended."""
        return _LONGEST_START_S + _MOST_TIMES_SLOWER * (WARM_UP_STEPS + self.steps) * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a plan's turns took: the median step of each, of the slowest rank, in seconds.

    `failure` says in one line why it did not run; empty if it did.
    """

    turns_s: tuple[float, ...] = ()
    failure: str = ""

    @property
    def step_s(self) -> float:
        """Median of the turns, in seconds."""
        return median(self.turns_s)


def run_trials(
    plans: Sequence[Plan],
    graph: ModelGraph,
    model_file: str | os.PathLike[str],
    *,
    device: str,
    settings: TrialSettings | None = None,
    progress: Progress | None = None,
) -> tuple[Trial, ...]:
    """Run plans of equally many ranks in turns on this machine; return a trial for each.

    `graph` is the model's capture in the plans' precision. A plan that fails is left out of later
    turns. Raises RankFailed where ranks fail outside a plan's turn, and KeyboardInterrupt when
    interrupted; no process and no file is left in any case.
    """
    settings = settings or TrialSettings()
    with tempfile.TemporaryDirectory(prefix="planner-trials-") as name:
        folder = Path(name)
        for index, plan in enumerate(plans):
            save_plan(plan, _plan_file(folder, index))
        (folder / "graph.json").write_text(json.dumps(to_json(graph)))
        limits = [settings.limit_s(plan.estimate.get("step_s", 0.0)) for plan in plans]
        request = {
            "model": os.fspath(Path(model_file).resolve()),
            "limits_s": limits,
            "steps": settings.steps,
            "turns": settings.turns,
            "clips_gradients": settings.clips_gradients,
        }
        (folder / "request.json").write_text(json.dumps(request))
        with _told(folder, len(plans), settings.turns, progress):
            code = run_workers(
                ["--trials", str(folder / "request.json")],
                num_ranks=plans[0].world_size,
                device=device,
            )
        if code:
            raise RuntimeError(f"ranks of trials ended with code {code}")
        return tuple(
            _read_trial(folder, index, plans[0].world_size, settings.turns)
            for index in range(len(plans))
        )


@contextmanager
def _told(
    folder: Path, num_plans: int, num_turns: int, progress: Progress | None
) -> Iterator[None]:
    """Tell beside the body how many turns have ended: launching ranks keeps this thread."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            failed = sum(_has_failed(folder, plan) for plan in range(num_plans))
            done = len(list(folder.glob("found-*-*-0.json")))
            left = num_turns * (num_plans - failed)
            progress(min(1.0, done / max(left, 1)), f"{done} of {left} turns have run")

    progress(0.0, f"starting ranks for {num_plans * num_turns} turns")
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_trial(folder: Path, plan: int, num_ranks: int, num_turns: int) -> Trial:
    if failures := [json.loads(file.read_text()) for file in _failures(folder, plan)]:
        # A rank that is gone is the cause; what its peers complain of, they may say first.
        failures.sort(key=lambda failure: (not failure["was_killed"], failure["at_s"]))
        return Trial(failure=failures[0]["why"])
    turns = []
    for turn in range(num_turns):
        files = [_found_file(folder, plan, turn, rank) for rank in range(num_ranks)]
        turns.append(max(median(json.loads(file.read_text())) for file in files))
    return Trial(turns_s=tuple(turns))


def _plan_file(folder: Path, plan: int) -> Path:
    return folder / f"plan-{plan}.json"


def _failures(folder: Path, plan: int) -> list[Path]:
    return list(folder.glob(f"failed-{plan}-*.json"))


def _has_failed(folder: Path, plan: int) -> bool:
    return bool(_failures(folder, plan))


def _found_file(folder: Path, plan: int, turn: int, rank: int) -> Path:
    return folder / f"found-{plan}-{turn}-{rank}.json"


# -- on a rank ------------------------------------------------------------------------------


def trials_worker(request: Path) -> None:
    """Do a rank's part of `run_trials`: a process for each turn of each plan.

    This process itself makes no tensor and asks for no device: neither survives a fork.
    """
    import torch.distributed  # noqa: F401  # once for all turns

    import planner.runtime.step.engine  # noqa: F401

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder, asked = request.parent, json.loads(request.read_text())
    rank = int(os.environ["RANK"])
    for turn in range(asked["turns"]):
        for plan, limit_s in enumerate(asked["limits_s"]):
            if _has_failed(folder, plan):
                continue
            child = os.fork()
            if child == 0:
                _turn(folder, asked, plan, turn, rank)
            _attend(child, folder, plan, rank, limit_s)


def _attend(child: int, folder: Path, plan: int, rank: int, limit_s: float) -> None:
    """Wait for a turn's process; end it if the plan failed elsewhere or its time is over."""
    until = time.monotonic() + limit_s
    status = None
    try:
        while status is None:
            pid, ended = os.waitpid(child, os.WNOHANG)
            if pid:
                status = ended
            elif _has_failed(folder, plan):
                return
            elif time.monotonic() > until:
                _fail(
                    folder, plan, rank, f"rank {rank} had not ended its turn after {limit_s:.0f} s"
                )
                return
            else:
                time.sleep(_POLL_S)
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = " (often: no memory left)" if name == "SIGKILL" else ""
        _fail(folder, plan, rank, f"rank {rank} was ended by {name}{hint}", was_killed=True)
    elif status and not _has_failed(folder, plan):
        code = os.WEXITSTATUS(status)
        _fail(folder, plan, rank, f"rank {rank} ended with code {code} and said nothing")


def _fail(folder: Path, plan: int, rank: int, why: str, *, was_killed: bool = False) -> None:
    """Say why a plan failed on a rank."""
    failure = {"why": why, "was_killed": was_killed, "at_s": time.monotonic()}
    scratch = folder / f"failing-{plan}-{rank}"
    scratch.write_text(json.dumps(failure))
    scratch.rename(folder / f"failed-{plan}-{rank}.json")  # whole, for who reads it meanwhile


def _turn(folder: Path, asked: dict[str, Any], plan: int, turn: int, rank: int) -> None:
    """Run a turn in this process and end it."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(os.getppid())
        seconds = _run(folder, asked, plan, turn)
        _found_file(folder, plan, turn, rank).write_text(json.dumps(seconds))
        code = 0
    except PlannerError as error:
        _fail(folder, plan, rank, str(error))
    except BaseException as error:
        first = (str(error).strip().splitlines() or [""])[0]
        _fail(folder, plan, rank, f"rank {rank}: {type(error).__name__}: {first}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(folder: Path, asked: dict[str, Any], plan: int, turn: int) -> list[float]:
    """Return seconds of the timed steps of a plan on this rank."""
    import torch
    import torch.distributed as dist

    from planner.capture.source.model_file import load_model_file
    from planner.runtime.process import device as devices
    from planner.runtime.process.groups.mesh import build_mesh
    from planner.runtime.step.engine import Engine

    device = devices.choose_device()
    devices.prepare(device)
    dist.init_process_group(
        devices.backend(device),
        init_method=f"file://{folder}/meeting-{plan}-{turn}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=asked["limits_s"][plan]),
        device_id=devices.bound_to(device),
    )
    chosen = load_plan(_plan_file(folder, plan))
    graph = from_json(json.loads((folder / "graph.json").read_text()))
    source = load_model_file(asked["model"])
    torch.manual_seed(0)
    model = source.build()
    engine = Engine(
        chosen,
        graph,
        model,
        build_mesh(chosen, device),
        max_grad_norm=_MAX_GRAD_NORM if asked["clips_gradients"] else None,
    )
    # As in `planner.apply`: the whole model would stay in memory beside this rank's pieces.
    model.to_empty(device="meta")
    batch = source.batch(chosen.global_batch)
    for _ in range(WARM_UP_STEPS):
        float(engine.step(batch))
    seconds = []
    for _ in range(asked["steps"]):
        start = time.perf_counter()
        float(engine.step(batch))  # waits for the device
        seconds.append(time.perf_counter() - start)
    # No rank leaves while another still needs it.
    engine.close()
    return seconds
