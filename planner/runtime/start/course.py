"""The course of a run: which failures it goes on after, and under which plan.

a rank was killed, lost a peer, hangs     start again from the newest checkpoint
an exception of the script                the same; not twice from one checkpoint
nodes are lost, or come (`elastic`)       the plan of as many ranks, searched if need be
no memory (`replans_on_oom`)              a plan for less memory than the rank had then
a mistake of the user's, NaN              the end: it would only come again
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from planner.errors import PlanError
from planner.files import write_atomically
from planner.language.plan import Plan, load_plan, save_plan
from planner.runtime.checkpoint import folder as folders
from planner.runtime.process.failures import Failure, read_failure

_LIMIT_FILE, _NEXT_LIMIT = "memory-limit", 0.9
"""Where a kept run notes how much its plans may need, in bytes; and the part of what the plan that
did not fit needed, its device's context aside, that the next one may."""


_FROM_OUTSIDE = {
    SIGKILL: (
        "SIGKILL: by the kernel where the host's memory is full (`dmesg` says so), or by somebody"
    ),
    SIGTERM: "SIGTERM: by what started it, or by somebody",
}
"""Signals that no program sends itself, and who sends them."""


Replan = Callable[[Sequence[int], int | None], Plan]
"""Returns the fastest plan for one of some numbers of ranks, and for a limit of bytes per device
(None: what the profile says). Raises PlanError where there is none."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a run is kept alive.

    Attributes:
        folder: of its checkpoints, and of plans made on the way.
        save_every: steps between two checkpoints.
        max_restarts: how often it may start again.
        min_ranks: the fewest ranks it goes on with; None: as many as the plan has.
        replan: searches for plans; None: no other plan is taken.
        replans_on_oom: whether to search for one where the memory was too small.
    """

    folder: Path
    save_every: int = 100
    max_restarts: int = 3
    min_ranks: int | None = None
    replan: Replan | None = None
    replans_on_oom: bool = False

    def __post_init__(self) -> None:
        """Raise PlanError for numbers that mean nothing."""
        for name in ("save_every", "min_ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"`{name}` {value} was given; give 1 or more")
        if self.max_restarts < 0:
            raise PlanError(f"`max_restarts` {self.max_restarts} was given; give 0 or more")


class Course:
    """What a node's launcher has seen of its run. Mutable: the last failure, and the plan."""

    def __init__(
        self, *, plan: Path | None, failure: Path, ranks_here: int, keeping: Keeping | None
    ) -> None:
        """`plan` is what the run begins with; `failure` the file that failing ranks write."""
        self._plan, self._failure_file = plan, failure
        self._ranks_here, self._keeping = ranks_here, keeping
        self.failure: Failure | None = None
        self._failed_at: str | None = None
        self._current: Path | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may train by another plan than the run began with."""
        keeping = self._keeping
        return keeping is not None and keeping.replan is not None

    def goes_on(self, failures: Mapping[int, Any]) -> bool:
        """Note why the node's ranks failed; whether the run may start again after it.

        `failures` are torchelastic's, by rank.
        """
        self.failure = failure = self._cause(failures)
        if self._keeping is None or failure.kind in ("user", "library", "values"):
            return False
        if failure.kind == "memory":
            return self._keeping.replans_on_oom and self._lower_limit(failure)
        if failure.kind != "script":
            return True
        # What fails twice from one place is a mistake in the script.
        before, self._failed_at = self._failed_at, self._newest()
        return before != self._failed_at

    def goes_on_without(self, lost: str) -> bool:
        """Note that a node is lost, in these words; whether the run may start again after it."""
        self.failure = Failure(kind="peer", rank=-1, text=f"planner: {lost}")
        return self._keeping is not None

    def _cause(self, failures: Mapping[int, Any]) -> Failure:
        told = read_failure(self._failure_file)
        died = [(f.timestamp, rank, f.exitcode) for rank, f in failures.items() if f.exitcode < 0]
        if told is None or (told.kind == "peer" and died):
            every = [(f.timestamp, rank, f.exitcode) for rank, f in failures.items()]
            # The agent ends the others by SIGTERM, within the second that timestamps are of.
            _, rank, code = min(died or every, key=lambda each: (each[2] == -SIGTERM, each))
            if -code in _FROM_OUTSIDE:
                text = f"planner: rank {rank} was ended by {_FROM_OUTSIDE[-code]}"
                return Failure(kind="killed", rank=rank, text=text)
            how = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
            text = f"planner: rank {rank} died {how} and said nothing"
            return Failure(kind="peer", rank=rank, text=text)
        return told

    def begin_again(self, number: int, most: int) -> None:
        """Tell why and from where the ranks start again, and forget the failure."""
        failure, self.failure = self.failure, None
        self._failure_file.unlink(missing_ok=True)
        newest = self._newest()
        where = f"from {newest}" if newest else "from the beginning: there is no checkpoint yet"
        if failure is None:
            why = "planner: other nodes leave or come"
        else:
            why = failure.text or f"planner: rank {failure.rank} failed"
            if failure.kind == "peer" and "\n" in why:
                # Of the traceback the last line is enough: the rank that is gone has the cause.
                why = f"planner: rank {failure.rank} lost another rank: {why.splitlines()[-1]:.120}"
        print(f"{why}\nplanner: restart {number} of {most}, {where}", file=sys.stderr, flush=True)

    def _newest(self) -> str:
        assert self._keeping is not None
        found = folders.newest_in(self._keeping.folder)
        return "" if found is None else found.name

    # -- plans --------------------------------------------------------------------------

    def plan_for(self, num_ranks: int) -> tuple[int, Path]:
        """Return the plan's number of ranks where so many are there, and its path."""
        self._current = self._choose(num_ranks)
        return load_plan(self._current).world_size, self._current

    def _choose(self, num_ranks: int) -> Path:
        """Return the path of the plan to train by where so many ranks are there.

        The plan that the run began with, if they are enough for it; else the fastest for fewer,
        down to half of what is there, searched once and kept beside the checkpoints. Raises
        PlanError where there is none.
        """
        keeping, first = self._keeping, self._plan
        assert keeping is not None
        assert keeping.replan is not None
        assert first is not None
        plan = load_plan(first)
        limit = self._memory_limit()
        if limit is None and plan.world_size <= num_ranks:
            return first
        most = min(plan.world_size, num_ranks)
        least = max(keeping.min_ranks or plan.world_size, -(-most // 2))
        name = f"plan-{most}-ranks" + ("" if limit is None else f"-{limit}-bytes")
        path = Path(os.path.abspath(keeping.folder)) / f"{name}-of-{_digest(first)}.json"
        if path.exists():
            return path
        found = keeping.replan(range(least, most + 1), limit)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(found, path)
        print(
            f"planner: {num_ranks} ranks are there; the plan is pp={found.pp} {found.degrees} "
            f"zero_stage={found.zero_stage} microbatch_size={found.microbatch_size}: {path}",
            file=sys.stderr,
            flush=True,
        )
        return path

    def _lower_limit(self, failure: Failure) -> bool:
        """Ask for a plan that is predicted to need less than the one that did not fit; whether
        anything is known of what that needed.

        What a rank needs and what is predicted for it differ by a factor that the next plan is
        likely to have too; so the limit is on the prediction, and not on the device's memory.
        """
        assert self._keeping is not None
        assert self._plan is not None
        estimate = load_plan(self._current or self._plan).estimate
        needed = estimate.get("peak_bytes") or failure.peak_bytes
        if needed is None:
            return False
        # The device's context takes the same under every plan.
        fixed = max(
            (rank.get("context_bytes", 0) for rank in estimate.get("memory", ())), default=0
        )
        limit = int(fixed + (needed - fixed) * _NEXT_LIMIT)
        write_atomically(self._keeping.folder / _LIMIT_FILE, f"{limit}\n")
        return True

    def _memory_limit(self) -> int | None:
        """The limit that an earlier failure has set, on this node or another one."""
        assert self._keeping is not None
        path = self._keeping.folder / _LIMIT_FILE
        return int(path.read_text()) if path.exists() else None


def _digest(path: Path) -> str:
    """A plan made from another first plan, of an earlier run in the folder, is no answer."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
