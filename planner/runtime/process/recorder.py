"""Records a rank's timeline while it runs, if asked to.

On a GPU, spans are pairs of CUDA events around the work, so they show when the device worked,
not when Python asked it to; they are read once they have happened, and nobody waits for them.
On a CPU they are the monotonic clock.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import IO

import torch
import torch.distributed as dist

from planner.language.layout.axes import EXPERT_COPIES, EXPERT_DATA, EXPERT_SHARDS
from planner.language.schedule.jobs import Job
from planner.runtime.process import device as devices
from planner.runtime.process.environment import TIMELINE_DIR
from planner.runtime.process.groups.mesh import Mesh
from planner.timeline import REPLICAS, rank_file, span_line, write_header

_CLOCK_ROUNDS = 8
_CLOCK_AGE_S = 10.0
"""A device's clock is set by the host's again after this long: they drift apart by some 10 us
a second.
"""

_MEMORY_AGE_S = 0.02
"""A CPU's memory counter takes as long to read as ten spans take to keep; it is read anew
after this long.
"""

_recorded: Counter[Path] = Counter()
"""How many engines of this process have recorded in a folder."""


def job_name(job: Job, kind: str | None = None) -> str:
    """Return a job's name in traces and profilers: kind, stage, microbatch, as ``F3.2``."""
    return f"{kind or job.kind}{job.stage_index}.{job.microbatch_index}"


Events = tuple[torch.Event, torch.Event]
_What = tuple[str, str, int, int, int]
"""Kind, name, step, stage, microbatch."""

_Moved = tuple[int, str, int]
"""The rows that came to experts, the lane of what was exchanged, and its bytes."""
_NOTHING: _Moved = (0, "", 0)

_Ended = tuple[_What, float, float, int, _Moved, Events | None]
"""A span that ended, its start and end by the host's clock, the bytes held then, what was
exchanged, and the events that know the times better, if any."""


class Recorder:
    """Spans of this rank. Mutable: it fills a buffer, and writes it at the end of a step."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.device = mesh.device
        self.on_gpu = devices.is_accelerator(mesh.device)
        self.ended: deque[_Ended] = deque()
        self.memory_bytes = _memory_counter(mesh.device)
        self.step = 0
        self.inside = -1, -1  # stage and microbatch of the job in work; of none
        self._lanes = _lanes_of(mesh)
        offset = _clock_offset_s(mesh)
        self._device_clock = DeviceClock(mesh.device) if self.on_gpu else None
        path = rank_file(folder, dist.get_rank())
        with path.open("w") as file:
            write_header(file, rank=dist.get_rank(), pp_rank=mesh.rank("pp"), clock_offset_s=offset)
        # Unbuffered, as each step's lines are written at once; and bytes, as all is ASCII.
        self._file: IO[bytes] = path.open("ab", buffering=0)
        if self.on_gpu:
            atexit.register(self.close)

    def span(
        self,
        kind: str,
        name: str,
        stage: int = -1,
        microbatch: int = -1,
        *,
        on_host: bool = False,
        lane: str = "",
        num_bytes: int = 0,
        rows: int = 0,
    ) -> _Open | _OpenByEvents:
        """Record what happens inside; `on_host` says that no device does it. What is exchanged has
        a `lane`, bytes, and the rows that it brings to experts.
        """
        what = (kind, name, self.step, stage, microbatch)
        moved = (rows, lane, num_bytes) if lane or rows else _NOTHING
        return (_OpenByEvents if self.on_gpu and not on_host else _Open)(self, what, moved)

    def in_job(
        self, kind: str, name: str, rows: int = 0, group: str = "", num_bytes: int = 0
    ) -> _Open | _OpenByEvents:
        """Record a collective of the job in work in a group of this name, with the rows that it
        brings to experts, or what runs beside one.
        """
        stage, microbatch = self.inside
        lane = self._lanes.get(group, "")
        return self.span(kind, name, stage, microbatch, lane=lane, num_bytes=num_bytes, rows=rows)

    def end_step(self) -> None:
        """Write out what has ended: on a GPU, that is not yet all of the step."""
        self.step += 1
        clock = self._device_clock
        if clock is None:
            self._write(len(self.ended))
            return
        if clock.age_s() > _CLOCK_AGE_S:
            devices.synchronize(self.device)
            self._write(len(self.ended))
            clock.set()
            return
        happened, known = 0, len(self.ended)  # copies that go on may add to it meanwhile
        while happened < known and _has_happened(self.ended[happened]):
            happened += 1
        self._write(happened)

    def close(self) -> None:
        """Write the rest."""
        if self._file.closed:
            return
        if self.on_gpu:
            devices.synchronize(self.device)
        self._write(len(self.ended))
        self._file.close()

    def _write(self, number: int) -> None:
        lines = []
        for _ in range(number):
            what, start_s, end_s, memory_bytes, moved, events = self.ended.popleft()
            if events is not None and self._device_clock is not None:
                start_s, end_s = map(self._device_clock.seconds, events)
            lines.append(span_line(*what, start_s, end_s, memory_bytes, *moved))
        self._file.write("".join(lines).encode("ascii"))


def _has_happened(span: _Ended) -> bool:
    events = span[-1]
    return events is None or events[1].query()


class DeviceClock:
    """Says when events of a device happened, on the host's clock. Mutable: it is set now and
    then.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = devices.of(device)
        self.set()

    def set(self) -> None:
        """Take an event that both clocks know, which events to come are counted from."""
        self._zero = self._module.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = perf_counter()

    def age_s(self) -> float:
        """How long ago it was set."""
        return perf_counter() - self._zero_s

    def seconds(self, event: torch.Event) -> float:
        """When an event happened, that has, and was recorded since the clock was set."""
        return self._zero_s + self._zero.elapsed_time(event) / 1e3


def _enter(recorder: Recorder, what: _What) -> tuple[int, int] | None:
    """Note the job that begins, and return what it is in; None for what is no job's, such as
    copies, which other threads record.
    """
    stage, microbatch = what[3:]
    if microbatch < 0:
        return None
    outer, recorder.inside = recorder.inside, (stage, microbatch)
    return outer


def _leave(recorder: Recorder, outer: tuple[int, int] | None) -> None:
    if outer is not None:
        recorder.inside = outer


class _Open:
    """A span that goes on; a class and not a generator, as it is made twice for every job."""

    __slots__ = ("_moved", "_outer", "_recorder", "_start_s", "_what")

    def __init__(self, recorder: Recorder, what: _What, moved: _Moved) -> None:
        self._recorder, self._what, self._moved = recorder, what, moved

    def __enter__(self) -> None:
        self._outer = _enter(self._recorder, self._what)
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        end_s, recorder = perf_counter(), self._recorder
        _leave(recorder, self._outer)
        recorder.ended.append(
            (self._what, self._start_s, end_s, recorder.memory_bytes(end_s), self._moved, None)
        )


class _OpenByEvents:
    """A span that goes on on a GPU."""

    __slots__ = ("_events", "_moved", "_outer", "_recorder", "_start_s", "_what")

    def __init__(self, recorder: Recorder, what: _What, moved: _Moved) -> None:
        self._recorder, self._what, self._moved = recorder, what, moved

    def __enter__(self) -> None:
        self._outer = _enter(self._recorder, self._what)
        event = devices.of(self._recorder.device).Event
        self._events = event(enable_timing=True), event(enable_timing=True)
        self._events[0].record()
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        end_s, recorder = perf_counter(), self._recorder
        self._events[1].record()
        _leave(recorder, self._outer)
        held = recorder.memory_bytes(end_s)
        recorder.ended.append((self._what, self._start_s, end_s, held, self._moved, self._events))


def start_recorder(mesh: Mesh) -> Recorder | None:
    """Return a recorder if the environment variable for timelines is set.

    A script's first engine records in the folder that it names, a second in ``engine-2`` in it.
    """
    name = os.environ.get(TIMELINE_DIR)
    if not name:
        return None
    folder = Path(name)
    _recorded[folder] += 1
    number = _recorded[folder]
    return Recorder(folder if number == 1 else folder / f"engine-{number}", mesh)


def _lanes_of(mesh: Mesh) -> dict[str, str]:
    """Return the axis that each of this rank's groups is along, by the group's name."""
    replicas = ("copies", "shards", "data", EXPERT_COPIES, EXPERT_SHARDS, EXPERT_DATA)
    groups = [(REPLICAS, mesh.group(name)) for name in replicas]
    groups += mesh.lowered_groups().items()
    return {group.group_name: axis for axis, group in groups if group is not None}


def _memory_counter(device: torch.device) -> Callable[[float], int]:
    """Return what tells, at a time, the bytes a device holds for this process; on a CPU its
    resident set.
    """
    if devices.is_accelerator(device):
        # (`memory_allocated` is this after flattening all statistics: ten times as long.)
        stats = devices.of(device).memory_stats_as_nested_dict
        return lambda _: int(stats(device)["allocated_bytes"]["all"]["current"])
    if sys.platform != "linux":
        return lambda _: 0
    return _ResidentSet()


class _ResidentSet:
    """Bytes of this process in memory, as of at most `_MEMORY_AGE_S` ago. Mutable: a reading."""

    def __init__(self) -> None:
        self._page_bytes = resource.getpagesize()
        # It stays open: opening takes most of the time.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._read_s = float("-inf")
        self._bytes = 0

    def __call__(self, now_s: float) -> int:
        if now_s - self._read_s > _MEMORY_AGE_S:
            self._bytes = int(os.pread(self._statm, 64, 0).split()[1]) * self._page_bytes
            self._read_s = now_s
        return self._bytes


def _clock_offset_s(mesh: Mesh) -> float:
    """What to add to this rank's clock to get rank 0's, from the quickest of some exchanges.

    Each rank in turn asks rank 0 for its time; the answer was read half a round trip ago.
    """
    here, clock = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    best = (float("inf"), 0.0)
    for rank in range(1, dist.get_world_size()):
        for _ in range(_CLOCK_ROUNDS):
            if here == 0:
                dist.recv(clock, rank, group=mesh.control)
                clock.fill_(perf_counter())
                dist.send(clock, rank, group=mesh.control)
            elif here == rank:
                asked_s = perf_counter()
                dist.send(clock, 0, group=mesh.control)
                dist.recv(clock, 0, group=mesh.control)
                round_s = perf_counter() - asked_s
                best = min(best, (round_s, clock.item() - asked_s - round_s / 2))
    return best[1]
