"""What ranks leave when they fail, what ends with them, and work that fails on all together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from planner.errors import ModelError, PlanError
from planner.runtime.process.failures import FAILURE_FILE, Failure, claim, read_failure
from planner.runtime.process.groups.together import together
from planner.runtime.process.host.lifetime import die_with


def test_the_first_to_fail_is_read_and_others_after_it_are_not(tmp_path, monkeypatch):
    path = tmp_path / "failure"
    monkeypatch.setenv(FAILURE_FILE, str(path))
    assert read_failure(path) is None
    first = Failure(kind="memory", rank=3, text="two\nlines", peak_bytes=7)
    assert claim(first)
    assert not claim(Failure(kind="peer", rank=0))
    assert read_failure(path) == first


def test_a_failure_nobody_waits_for_is_not_claimed(tmp_path, monkeypatch):
    monkeypatch.delenv(FAILURE_FILE, raising=False)
    assert not claim(Failure(kind="user", rank=0))
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "gone" / "failure"))  # with its launcher
    assert not claim(Failure(kind="user", rank=0))


@pytest.mark.parametrize("text", ["", '{"kind": "us', "\udcff"])
def test_a_failure_cut_short_by_a_kill_is_none(tmp_path, text):
    path = tmp_path / "failure"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert read_failure(path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_process_dies_with_its_parent_even_if_it_was_gone_before(monkeypatch, is_alive):
    """The signal is set first: a parent that goes between both would be missed."""
    events: list[object] = []
    library = SimpleNamespace(prctl=lambda *given: events.append(given))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(os, "getppid", lambda: events.append("looked") or (7 if is_alive else 1))
    monkeypatch.setattr(os, "_exit", lambda code: events.append(f"ended {code}"))
    die_with(7)
    assert events == [(1, signal.SIGKILL), "looked", *([] if is_alive else ["ended 1"])]


def raising(error):
    def work():
        raise error

    return work


def test_work_of_all_ranks_returns_or_fails_on_all(monkeypatch):
    """Whatever comes second: ranks raise the same error, that of the first that failed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert together(None, lambda: {"a": 1}) == [{"a": 1}]
    assert together(None, lambda: None) == [None]
    mistake = ModelError("the rule, and what to try")
    with pytest.raises(PlanError, match=r"^the rule, and what to try$") as caught:
        together(None, raising(mistake))
    assert caught.value.__cause__ is mistake
    with pytest.raises(PlanError, match=r"FileNotFoundError: .* 'here'"):
        together(None, raising(FileNotFoundError(2, "No such file", "here")))
    with pytest.raises(RuntimeError, match=r"^rank 0: ZeroDivisionError: by zero$"):
        together(None, raising(ZeroDivisionError("by zero")))
    with pytest.raises(PlanError, match=r"^PlanError$"):  # no text is a failure, too
        together(None, raising(PlanError("")))

    def gather(found, own, group):
        found[:] = [(1, "", False), (None, "first", True), (None, "second", False)]

    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(PlanError, match=r"^first$") as caught:
        together(None, lambda: 1)
    assert caught.value.__cause__ is None
