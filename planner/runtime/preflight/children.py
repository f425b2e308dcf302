"""A node's ranks as processes of its launcher, and what all ranks of all nodes leave in the store.

They are started here and not by torchelastic: where a rank ends or stays away, the others' findings
are what is wanted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from planner.runtime.preflight.rank import START_S, STEP_S, Finding, Request
from planner.runtime.process.environment import LAUNCHER
from planner.runtime.start.workers import worker_command

if TYPE_CHECKING:
    from torch.distributed import Store

ALL_S = START_S + 4 * STEP_S
"""Seconds after which ranks are given up: more than their own limits come to."""

LATE_S = 3 * STEP_S
"""Seconds after the first rank's finding in which the others' must come."""

END_S = 5.0
"""Seconds that others get for theirs after a rank has ended without one: they wait for it."""

OUT_OF_REACH = "is not heard of: the store is out of reach"

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A rank's process, and what it writes."""

    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def end(self) -> str:
        """Return how the process ended; nothing while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


@contextmanager
def children(
    request: Request, ranks: Sequence[int], world_size: int, variables: Mapping[str, str]
) -> Iterator[list[Child]]:
    """Start these ranks, and end what is left of them; `variables` are all ranks'."""
    with tempfile.TemporaryDirectory(prefix="planner-preflight-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(asdict(request)))
        started: list[Child] = []
        try:
            for at, rank in enumerate(ranks):
                environment = {
                    # (torchrun's, where it started this process as a rank, before ours.)
                    "LOCAL_RANK": str(at),
                    "LOCAL_WORLD_SIZE": str(len(ranks)),
                    **os.environ,
                    **variables,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    LAUNCHER: str(os.getpid()),
                }
                log = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
                process = subprocess.Popen(
                    worker_command(["--check-nodes", str(path)]),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                started.append(Child(rank=rank, process=process, log=log))
            yield started
        finally:
            for child in started:
                child.process.kill()
            for child in started:
                child.process.wait()
                child.log.close()


def await_findings(
    store: Store,
    room: str,
    world_size: int,
    own: Sequence[Child],
    lost: Callable[[], str] = lambda: "",
) -> tuple[dict[int, Finding], dict[int, str]]:
    """Return what all ranks found, by rank, and what became of those that left nothing.

    All nodes call this, and return the same where none is cut off: of its own ranks' ends each
    tells the others. It waits no longer when `lost` says that a node is gone.
    """
    from torch.distributed import PrefixStore

    of_ranks = PrefixStore(room, store)
    keys = [f"found/{rank}" for rank in range(world_size)]
    began = time.monotonic()
    limit_s, is_over = ALL_S, False
    seen: set[int] = set()
    told: dict[int, str] = {}
    with suppress(RuntimeError):  # the store does not answer: what is known is told
        while not (lost() or of_ranks.check(keys)) and time.monotonic() - began < limit_s:
            for child in own:
                if child.rank not in seen and (ended := child.end()):
                    seen.add(child.rank)
                    if not of_ranks.check([keys[child.rank]]):
                        of_ranks.set(f"ended/{child.rank}", ended)
                        of_ranks.set("an end", "")
            if limit_s == ALL_S and of_ranks.check(["a finding"]):
                # The others can't be long: their limits are those of the first.
                limit_s = time.monotonic() - began + LATE_S
            if not is_over and of_ranks.check(["an end"]):
                is_over, limit_s = True, time.monotonic() - began + END_S
            time.sleep(_POLL_S)
        found = {}
        for rank in range(world_size):
            if of_ranks.check([f"found/{rank}"]):
                found[rank] = Finding.of(of_ranks.get(f"found/{rank}").decode())
            elif of_ranks.check([f"ended/{rank}"]):
                told[rank] = of_ranks.get(f"ended/{rank}").decode()
            elif of_ranks.check([f"phase/{rank}"]):
                told[rank] = f"came no further than {of_ranks.get(f'phase/{rank}').decode()}"
            else:
                told[rank] = lost() or f"did not come up in {ALL_S:.0f} s"
        return found, told
    return {}, dict.fromkeys(range(world_size), OUT_OF_REACH)
