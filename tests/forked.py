"""Ranks of a started run that fork from the server of `tests.spawn`, which has torch.

A rank takes seconds to import what it needs. A test of what a run computes or tells, not of how its
processes begin and are ended, saves them: they fork, and then are what the start of a process would
have made of them (session, folder, environment, output, `planner.worker`). Captures
and reaches of optimizers are those of `tests.spawn_preload`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import IO, Any

import pytest

from planner.runtime.process.environment import LAUNCHER
from planner.runtime.start.workers import worker_command
from tests.spawn import context

_TORCHELASTIC = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let ranks that this process starts fork."""
    patch.setattr(f"{_TORCHELASTIC}.Popen", ForkedRank)
    signalling = SimpleNamespace(**(vars(os) | {"killpg": _signal_group}))
    patch.setattr(f"{_TORCHELASTIC}.os", signalling)
    forking = SimpleNamespace(**(vars(subprocess) | {"Popen": ForkedRank}))
    patch.setattr("planner.runtime.preflight.children.subprocess", forking)


def _signal_group(group: int, number: int) -> None:
    """Signal a group of processes. A rank that has just ended is gone, as the server has waited for
    it; a child of this process would still take the signal.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


class ForkedRank:
    """A rank, as far as `subprocess.Popen` is used for ranks. Mutable: how it ended."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert tuple(args[:4]) == worker_command([]), args
        assert stdin in (None, subprocess.DEVNULL), "a forked rank reads nothing"
        begun, begins = context.Pipe(duplex=False)
        self._rank = context.Process(
            target=_become,
            args=(list(args[4:]), dict(env), os.getcwd(), _Output(stdout, 1), _Output(stderr, 2),
                  begins),
        )  # fmt: skip
        self._rank.start()
        begins.close()
        with begun:
            begun.recv()  # it leads its session: signals to it reach all that it starts
        self.pid = self._rank.pid

    @property
    def returncode(self) -> int | None:
        """How it ended: its exit code, or minus the signal; None while it runs."""
        return self._rank.exitcode

    def kill(self) -> None:
        self._rank.kill()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._rank.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
        return self.returncode


class _Output:
    """Where a stream of a process goes: a file, or where this process's own stream goes."""

    def __init__(self, file: IO[Any] | None, number: int) -> None:
        self._file_number = number if file is None else file.fileno()
        self._number = number

    def __reduce__(self) -> Any:
        return _take, (DupFd(self._file_number), self._number)


def _take(file: Any, number: int) -> tuple[int, int]:
    return file.detach(), number


def _become(
    args: list[str],
    environment: dict[str, str],
    folder: str,
    stdout: tuple[int, int],
    stderr: tuple[int, int],
    begins: Connection,
) -> None:
    import torch

    from planner import worker

    os.setsid()  # (a rank that needs no session of its own does not mind one)
    begins.send(None)
    begins.close()
    for file, number in (stdout, stderr):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[LAUNCHER] = str(os.getppid())  # the server, which ends with the test process
    os.chdir(folder)
    sys.argv = [worker.__file__, *args]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    worker.main(args)
