"""The doctor on the node itself, beside what a kernel would show of other nodes."""

from __future__ import annotations

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.doctor.machine import check_machine
from planner.nodes.check import Check
from planner.units import GIB, MIB

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Findings by name of a node with 100 GiB, most of it free, unless a test changes that."""
    (tmp_path / "meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 94371840 kB\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    sizes = {"disk": 100 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(sizes["disk"], 0, sizes["disk"]))

    def check() -> dict[str, Check]:
        findings = check_machine(proc=tmp_path, shared=tmp_path)
        return {finding.name: finding for finding in findings}

    return SimpleNamespace(check=check, sizes=sizes, folder=tmp_path)


def test_a_node_in_order(found):
    told = found.check()
    assert told["memory"].found == "90.00 GiB of 100.00 GiB available"
    assert {told[name].state for name in ("memory", "shared memory", "cache folder")} == {"ok"}
    assert "threads" not in told


def test_memory_that_others_hold(found):
    (found.folder / "meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 1048576 kB\n")
    assert found.check()["memory"].state == "warning"
    (found.folder / "meminfo").unlink()
    assert "memory" not in found.check()


def test_a_container_s_small_shared_memory_and_a_full_disk(found):
    found.sizes["disk"] = 64 * MIB
    told = found.check()
    assert "--shm-size" in told["shared memory"].advice
    assert told["cache folder"].state == told["working folder"].state == "warning"


def test_a_folder_that_can_t_be_written(found, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "XDG_CACHE_HOME" in found.check()["cache folder"].advice


def test_threads_that_the_environment_fixes(found, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "unset it" in found.check()["threads"].advice


def test_few_open_files(found, monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (256, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits.get(what, (-1, -1)))
    told = found.check()["open files"]
    assert (told.found, told.advice) == ("256 at most", "ulimit -n 1024")


@pytest.mark.parametrize(("answer", "state"), [("yes", "ok"), ("no", "warning"), ("", None)])
def test_whether_a_server_sets_the_clock(found, monkeypatch, answer, state):
    import subprocess

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=answer + "\n")
    )
    told = found.check()
    assert ("clock" in told) == (state is not None)
    assert state is None or told["clock"].state == state


def test_this_machine_is_told_whole():
    assert {"cores", "working folder"} <= {finding.name for finding in check_machine()}
    assert Path.cwd().exists()
