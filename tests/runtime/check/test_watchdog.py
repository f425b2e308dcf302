"""What a stalled run prints: each rank's job, once, and for whom all others wait."""

from __future__ import annotations

import time

import torch.distributed as dist

from planner.runtime.check.watchdog import ENDS_S, STALL_S, Status, Watchdog


class Executor:
    def __init__(self, status: Status) -> None:
        self.now = status

    def status(self) -> Status:
        return self.now


def note(store, rank: int, *, waits: bool, text: str, age_s: float = 0.0) -> None:
    prefixed = dist.PrefixStore("planner-watchdog", store)
    prefixed.set(str(rank), f"{time.time() - age_s:.0f} 3 {waits:d} {text}")


def test_it_names_the_rank_that_all_others_wait_for(capfd):
    store = dist.HashStore()
    executor = Executor(Status(3, True, "job 0F1"))
    dog = Watchdog(executor.status, store, rank=0, world_size=4)
    note(store, 0, waits=True, text="job 0F1 waits for 1B0")
    note(store, 1, waits=False, text="job 1B0")
    note(store, 2, waits=True, text="job 2F1", age_s=100)
    dog._tell()
    dog._tell()  # another rank found it too
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
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and "job 0F0" not in capfd.readouterr().err:
        time.sleep(0.02)
    assert time.monotonic() < deadline
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
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and len(ends) < 2:
        time.sleep(0.02)
    for dog in dogs:
        dog.stop()
    printed = capfd.readouterr().err
    assert printed.count("nothing has moved") == 1
    for rank in (0, 1):
        assert printed.count(f"planner: stacks of rank {rank}") == 1
    assert "test_every_rank_prints_its_stacks_once" in printed
    assert any("rank 0 has not moved" in end and "from rank 1" in end for end in ends)
