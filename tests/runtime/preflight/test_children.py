"""Issue 19, 7: ranks are started, ended whatever happens, and what they leave is read by all."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from planner.runtime.preflight import children as module
from planner.runtime.preflight.children import Child, await_findings, children
from planner.runtime.preflight.rank import Finding, Request

REQUEST = Request(plan="/p/plan.json", host="a", port=1234, room="room", nodes=((0, 1), (2, 3)))
TELL = """
import json, os, sys
from pathlib import Path
told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "THREADS")}
told["request"] = json.loads(Path(sys.argv[1]).read_text())
print(json.dumps(told), flush=True)
"""
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def worker(monkeypatch):
    """Run a line of Python in place of ranks."""

    def run(code: str) -> None:
        def command(args):
            assert args[0] == "--check-nodes"
            return [sys.executable, "-I", "-c", code, *args[1:]]

        monkeypatch.setattr(module, "worker_command", command)

    return run


def ended(child: Child) -> str:
    child.process.wait(30)
    return child.end()


def test_ranks_are_told_their_numbers_and_the_request(worker, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    worker(TELL)
    with children(REQUEST, [2, 3], 4, {"THREADS": "7"}) as started:
        assert [child.rank for child in started] == [2, 3]
        for at, child in enumerate(started):
            how, told = ended(child).split(": ", 1)
            assert how == "ended with 0"
            assert told.startswith(f'{{"RANK": "{2 + at}", "WORLD_SIZE": "4", "LOCAL_RANK": "{at}"')
            child.log.seek(0)
            whole = json.loads(child.log.read())
            assert whole["THREADS"] == "7"
            request = whole["request"] | {"nodes": tuple(map(tuple, whole["request"]["nodes"]))}
            assert Request(**request) == REQUEST


def test_no_rank_outlives_its_launcher_s_checks(worker):
    worker(SLEEP)
    started: list[Child] = []

    def interrupted() -> None:
        with children(REQUEST, [0, 1], 2, {}) as running:
            started.extend(running)
            assert [child.end() for child in running] == ["", ""]
            raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        interrupted()
    assert [child.process.returncode for child in started] == [-9, -9]
    assert all(child.log.closed for child in started)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('one'); raise SystemExit(3)", "ended with 3: one"),
        ("raise SystemExit(3)", "ended with 3"),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM"),
        ("raise ValueError('x' * 300)", "ended with 1: ValueError: " + "x" * 188),
    ],
)
def test_how_a_rank_ended_is_told_with_its_last_line(worker, code, told):
    worker(code)
    with children(REQUEST, [0], 1, {}) as (child,):
        assert ended(child) == told


# ---- what ranks leave


class Ended:
    """A process that has ended."""

    def poll(self) -> int:
        return -11


@pytest.fixture
def rooms(monkeypatch):
    """A store, and short limits: at once nobody waits for, and what they are told has them."""
    monkeypatch.setattr(module, "ALL_S", 0.8)
    monkeypatch.setattr(module, "LATE_S", 0.3)
    monkeypatch.setattr(module, "END_S", 0.2)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    store = HashStore()
    return store, PrefixStore("room", store)


def leave(room, rank: int) -> Finding:
    finding = Finding(phase="done", address=f"10.0.0.{rank}")
    room.set(f"found/{rank}", finding.to_json())
    room.set("a finding", "")
    return finding


def test_findings_of_all_ranks_are_read_as_they_are(rooms, monkeypatch):
    store, room = rooms
    expected = {rank: leave(room, rank) for rank in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it waits for nobody"))
        assert await_findings(store, "room", 3, []) == (expected, {})
    # Of another preflight in the same store nothing is there.
    found, told = await_findings(store, "another", 3, [])
    assert found == {}
    assert set(told) == {0, 1, 2}


def test_a_rank_that_ended_without_a_finding_is_told_to_all_nodes(rooms, monkeypatch):
    """Only its own launcher sees the process; the others wait a little and say the same."""
    monkeypatch.setattr(module, "ALL_S", 60.0)
    monkeypatch.setattr(module, "LATE_S", 50.0)
    store, room = rooms
    began = time.monotonic()
    first = leave(room, 0)
    with tempfile.TemporaryFile() as log:
        log.write(b"torch\nno memory left\n")
        own = [Child(rank=2, process=Ended(), log=log)]  # type: ignore[arg-type]
        results = {}
        threads = [
            threading.Thread(
                target=lambda at, mine: results.update(
                    {at: await_findings(store, "room", 4, mine)}
                ),
                args=(at, mine),
            )
            for at, mine in enumerate([[], own])
        ]
        room.set("phase/3", "pairs")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert time.monotonic() - began < 50
    assert results[0] == results[1]
    found, told = results[0]
    assert found == {0: first}
    assert told == {
        1: "did not come up in 60 s",
        2: "was killed by SIGSEGV: no memory left",
        3: "came no further than pairs",
    }


def test_after_the_first_finding_the_others_are_soon_given_up(rooms, monkeypatch):
    monkeypatch.setattr(module, "ALL_S", 60.0)
    store, room = rooms
    leave(room, 0)
    began = time.monotonic()
    found, told = await_findings(store, "room", 2, [])
    assert 0.3 <= time.monotonic() - began < 60
    assert (set(found), set(told)) == ({0}, {1})


def test_a_store_that_does_not_answer_leaves_nothing_known(rooms):
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, None, is_master=False)
    leave(PrefixStore("room", store), 0)
    del server
    found, told = await_findings(store, "room", 2, [])
    assert found == {}
    assert told == dict.fromkeys((0, 1), "is not heard of: the store is out of reach")
