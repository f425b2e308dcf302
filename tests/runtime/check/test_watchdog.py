"""What a stalled run prints: each rank's job, once, and for whom all others wait."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.watchdog import ENDS_S, STALL_S, Status, Watchdog
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny
from tests.spawn import until


class Printed:
    """All that goes to stderr from now on."""

    def __init__(self, capfd) -> None:
        self._capfd, self._text = capfd, ""

    def text(self) -> str:
        self._text += self._capfd.readouterr().err
        return self._text


class Executor:
    def __init__(self, status: Status) -> None:
        self.now = status

    def status(self) -> Status:
        return self.now


def note(store, rank: int, *, waits: bool, text: str, age_s: float = 0.0) -> None:
    prefixed = dist.PrefixStore("planner-watchdog", store)
    prefixed.set(str(rank), f"{time.time() - age_s:.0f} 3 1 {waits:d} {text}")


def test_it_names_the_rank_that_all_others_wait_for(capfd):
    store = dist.HashStore()
    executor = Executor(Status(3, True, "job 0F1"))
    dog = Watchdog(executor.status, store, rank=0, world_size=4)
    note(store, 0, waits=True, text="job 0F1 waits for 1B0")
    note(store, 1, waits=False, text="job 1B0")
    note(store, 2, waits=True, text="job 2F1", age_s=100)
    dog._tell()
    printed = capfd.readouterr().err
    assert printed.count("nothing has moved") == 1
    assert "rank 2: job 2F1 (silent for 100 s)" in printed
    assert "rank 3: not heard of yet" in printed
    assert "all others wait, in the end, for rank 1 (job 1B0)" in printed


def test_a_job_that_moves_is_no_stall_and_one_that_does_not_is(capfd, monkeypatch):
    monkeypatch.setenv(STALL_S, "0.08")
    executor = Executor(Status(1, True, "job 0F0"))
    dog = Watchdog(executor.status, dist.HashStore(), rank=0, world_size=2)
    dog.start()
    until(lambda: "job 0F0" in capfd.readouterr().err)
    dog.stop()
    assert not dog.is_alive()


def test_every_rank_prints_its_stacks_once_and_a_kept_run_ends(capfd, monkeypatch):
    """Whoever told the stall; the end tells which job this rank has been in."""
    monkeypatch.setenv(STALL_S, "0.08")
    monkeypatch.setenv(ENDS_S, "0.3")
    store, ends = dist.HashStore(), []
    executor = Executor(Status(1, True, "job 0F0, waiting for x of microbatch 0 from rank 1"))
    other = Executor(Status(1, True, "job 1F0"))
    dogs = [
        Watchdog(each.status, store, rank=rank, world_size=2, end=ends.append)
        for rank, each in enumerate((executor, other))
    ]
    for dog in dogs:
        dog.start()
    until(lambda: len({end.split(" has")[0] for end in ends}) == 2)
    for dog in dogs:
        dog.stop()
    printed = capfd.readouterr().err
    assert printed.count("nothing has moved") == 1
    for rank in (0, 1):
        assert printed.count(f"planner: stacks of rank {rank}") == 1
    assert "test_every_rank_prints_its_stacks_once" in printed
    assert any("rank 0 has not moved" in end and "from rank 1" in end for end in ends)


def test_a_rank_that_waits_while_another_moves_is_no_stall(capfd, monkeypatch):
    """It waits in its sums of gradients for as long as the other's jobs take."""
    monkeypatch.setenv(STALL_S, "1")  # far more than a busy machine takes between two moves
    store = dist.HashStore()
    waiting = Executor(Status(7, True, "sums of gradients", waits=True))
    moving = Executor(Status(0, True, "job 1B0"))
    dogs = [
        Watchdog(each.status, store, rank=rank, world_size=2)
        for rank, each in enumerate((waiting, moving))
    ]
    for dog in dogs:
        dog.start()
    for progress in range(1, 40):
        time.sleep(0.05)
        moving.now = Status(progress, True, "job 1B0")
    moved = capfd.readouterr().err
    stopped = Printed(capfd)
    until(lambda: "nothing has moved" in stopped.text())
    for dog in dogs:
        dog.stop()
    assert moved == ""
    assert "all others wait, in the end, for rank 1 (job 1B0)" in stopped.text()


def test_a_rank_in_the_users_own_code_does_not_end_the_run(capfd, monkeypatch):
    """Rank 0 evaluates between two steps, and the others wait in the next one."""
    monkeypatch.setenv(STALL_S, "0.5")
    monkeypatch.setenv(ENDS_S, "0")
    store, ends = dist.HashStore(), []
    evaluating = Executor(Status(7, False, "between two steps"))
    waiting = Executor(Status(8, True, "job 1F0", waits=True))
    dogs = [
        Watchdog(each.status, store, rank=rank, world_size=2, end=ends.append)
        for rank, each in enumerate((evaluating, waiting))
    ]
    for dog in dogs:
        dog.start()
    told = Printed(capfd)
    until(lambda: "stacks of rank 1" in told.text())
    time.sleep(0.5)
    assert "all others wait, in the end, for rank 0 (between two steps)" in told.text()
    assert not ends
    evaluating.now = Status(7, True, "job 0F0")
    until(lambda: ends)
    for dog in dogs:
        dog.stop()
    assert ends


def test_every_part_of_a_step_has_words(monkeypatch):
    """What a rank does while it waits for others behind its row is told like a job."""
    plan = default_plan(capture_tiny("mlp"), num_microbatches=2, microbatch_size=2)
    module = MlpWithTarget()
    engine = planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    seen = {}

    def watched(owner, name):
        call = getattr(owner, name)

        def noting(*given, **settings):
            seen[name] = engine._executor.status()
            return call(*given, **settings)

        monkeypatch.setattr(owner, name, noting)

    watched(engine._feeder, "feed")
    for name in ("finish_sums", "gradients", "step"):
        watched(engine.state.trained, name)
    assert not engine._executor.status().is_busy
    engine.step(mlp_batch(4))
    assert not engine._executor.status().is_busy
    assert [status.text for status in seen.values()] == [
        "its part of the batch, which all ranks agree on",
        "sums of gradients",
        "its look for NaN",
        "its optimizer's step",
    ]
    assert all(status.is_busy and status.waits for status in seen.values())
    counts = [status.progress for status in seen.values()]
    assert counts == sorted(set(counts))
