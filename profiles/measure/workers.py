"""The measuring side of `worker`: start ranks, give tasks, survive their deaths."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from planner.errors import ProfileError
from profiles.measure.nodes.launchers import Launcher, new_token

START_TIMEOUT_S = 120.0
FAILURE_GRACE_S = 5.0
END_TIMEOUT_S = 30.0
"""How long a rank that hung up may take to end; on a busy machine unloading torch takes seconds."""


_LOOK_S = 1.0
"""How often the nodes are looked at while answers are awaited."""


class ProbeFailed(Exception):
    """A task gave no answer: an error in a worker, its death, or a time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """The line to one worker: text lines both ways."""

    connection: socket.socket
    lines: IO[str]

    def say(self, line: str) -> None:
        self.connection.sendall(line.encode())

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


class WorkerGroup:
    """Worker processes, started by a launcher when first needed.

    `call` gives every rank the same task. After a death or a time limit all ranks are
    ended and the next call starts new ones. Mutable: it owns processes.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._num_ranks = launcher.num_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._peers: list[_Peer] = []
        self._log: IO[bytes] | None = None

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()
        self._launcher.close()

    def call(self, task: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """Return every rank's answer, in rank order; raise ProbeFailed if there is none."""
        if not self._processes:
            self._start()
        try:
            line = json.dumps(task) + "\n"
            for peer in self._peers:
                peer.say(line)
            answers = self._collect(time.monotonic() + timeout_s)
        except (OSError, TimeoutError, EOFError) as error:
            # The peers of a rank that is gone hang in a collective with it: all are ended.
            reason = self._obituary(error)
            self.stop()
            raise ProbeFailed(reason) from None
        failures = [answer["error"] for answer in answers if "error" in answer]
        if failures:
            if len(failures) < len(answers):
                # The ranks no longer agree on what comes next.
                self.stop()
            raise ProbeFailed(failures[0])
        return answers

    def stop(self) -> None:
        """End all ranks. They end by themselves when this process is gone."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()
        # All are killed before any is waited for, so the slowest to end sets the time.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        if self._log is not None:
            self._log.close()
        self._processes, self._peers, self._log = [], [], None

    def _start(self) -> None:
        token = new_token()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        with socket.create_server((self._launcher.listen_on, 0)) as server:
            port = server.getsockname()[1]
            self._processes = self._launcher.start(port, token, self._log)
            try:
                self._peers = self._accept(server, token)
            except TimeoutError as error:
                reason = self._obituary(error)
                self.stop()
                raise ProbeFailed(f"workers did not start: {reason}") from None

    def _accept(self, server: socket.socket, token: str) -> list[_Peer]:
        """Wait until every rank has connected and said its token."""
        deadline = time.monotonic() + START_TIMEOUT_S
        peers: dict[int, _Peer] = {}
        server.settimeout(0.2)
        while len(peers) < self._num_ranks:
            if any(process.poll() is not None for process in self._processes):
                raise TimeoutError("a worker ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no connection within {START_TIMEOUT_S:.0f} s")
            self._check_nodes()
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.settimeout(START_TIMEOUT_S)
            lines = connection.makefile("r", encoding="utf-8", newline="\n")
            hello = json.loads(lines.readline() or "{}")
            # On a cluster the port is open to the network: only who was given the token is a rank.
            if hello.get("token") == token:
                peers[hello["rank"]] = _Peer(connection=connection, lines=lines)
            connection.settimeout(None)
        return [peers[rank] for rank in range(self._num_ranks)]

    def _collect(self, deadline: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, peer in enumerate(self._peers):
                selector.register(peer.connection, selectors.EVENT_READ, rank)
            while len(answers) < self._num_ranks:
                left_s = max(0.0, deadline - time.monotonic())
                ready = selector.select(min(left_s, _LOOK_S))
                if not ready:
                    self._check_nodes()
                    if left_s > _LOOK_S:
                        continue
                    failed = [answer["error"] for answer in answers.values() if "error" in answer]
                    raise TimeoutError(failed[0] if failed else "time limit reached")
                for key, _ in ready:
                    # An answer is one short line, written at once, so this does not block long.
                    try:
                        line = self._peers[key.data].lines.readline()
                    except ConnectionError:  # it ended before it read its task
                        line = ""
                    if not line:
                        raise EOFError(f"rank {key.data} ended")
                    answers[key.data] = json.loads(line)
                    if "error" in answers[key.data]:
                        # Peers may wait for it in vain; they get a moment to fail likewise.
                        deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self._num_ranks)]

    def _check_nodes(self) -> None:
        """Raise ProfileError where a node is gone: without it there is nothing to go on with."""
        if lost := self._launcher.lost():
            raise ProfileError(
                f"{lost}: the measurement ends; what was measured is kept, and the same command "
                "on all nodes goes on from it"
            )

    def _obituary(self, error: BaseException) -> str:
        """Say what happened: exit codes and the last line the workers wrote."""
        # A rank that hung up is about to end; who ran out of time may never.
        patience = 0.2 if isinstance(error, TimeoutError) else END_TIMEOUT_S
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not any(
            process.poll() for process in self._processes
        ):
            time.sleep(0.02)
        codes = [p.returncode for p in self._processes if p.returncode not in (None, 0)]
        last = ""
        if self._log is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            last = lines[-1][:200] if lines else ""
        how = "".join(
            f", killed by signal {-code}" if code < 0 else f", exit code {code}"
            for code in codes[:1]
        )
        return f"{error}{how}{': ' + last if last and codes else ''}"
