"""Records a rank's timeline while it runs, if asked to.

On a GPU, spans are pairs of CUDA events around the work and are read when the step is
over, so they show when the device worked, not when Python asked it to; on a CPU they are
the monotonic clock.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from planner.runtime.mesh import Mesh
from planner.runtime.workers import TIMELINE_DIR
from planner.schedule.jobs import Job
from planner.timeline import Span, rank_file, write_header, write_spans

_CLOCK_ROUNDS = 8


def job_name(job: Job, kind: str | None = None) -> str:
    """Return a job's name in traces and profilers: kind, stage, microbatch, as ``F3.2``."""
    return f"{kind or job.kind}{job.stage_index}.{job.microbatch_index}"


class Recorder:
    """Spans of this rank. Mutable: it fills and flushes a buffer, once per step."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.on_gpu = mesh.device.type == "cuda"
        self._spans: list[Span] = []
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._memory_bytes = _memory_counter(mesh.device)
        self.step = 0
        offset = _clock_offset_s(mesh)
        self._file: IO[str] = rank_file(folder, dist.get_rank()).open("w")
        write_header(
            self._file, rank=dist.get_rank(), pp_rank=mesh.rank("pp"), clock_offset_s=offset
        )

    def span(
        self, kind: str, name: str, stage: int = -1, microbatch: int = -1, *, on_host: bool = False
    ) -> _Open:
        """Record what happens inside; `on_host` says that no device does it."""
        return _Open(self, kind, name, stage, microbatch, by_events=self.on_gpu and not on_host)

    def add(
        self,
        span: _Open,
        start_s: float,
        end_s: float,
        events: tuple[torch.cuda.Event, ...] | None,
    ) -> None:
        """Keep a span that ended."""
        if events is not None:
            self._events.append((len(self._spans), events[0], events[1]))
        self._spans.append(
            Span(
                kind=span.kind,
                name=span.name,
                step=self.step,
                stage=span.stage,
                microbatch=span.microbatch,
                start_s=start_s,
                end_s=end_s,
                memory_bytes=self._memory_bytes(),
            )
        )

    def end_step(self) -> None:
        """Write the step's spans out."""
        if self._events:
            self._read_events()
        write_spans(self._file, self._spans)
        self._file.flush()
        self._spans.clear()
        self.step += 1

    def _read_events(self) -> None:
        """Replace host times by device times: count back from an event both clocks know."""
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        now_s = time.perf_counter()
        for index, begin, end in self._events:
            self._spans[index] = replace(
                self._spans[index],
                start_s=now_s - begin.elapsed_time(now) / 1e3,
                end_s=now_s - end.elapsed_time(now) / 1e3,
            )
        self._events.clear()


class _Open:
    """A span that goes on; a class and not a generator, as it is made twice for every job."""

    __slots__ = (
        "_by_events", "_events", "_recorder", "_start_s", "kind", "microbatch", "name", "stage",
    )  # fmt: skip

    def __init__(
        self,
        recorder: Recorder,
        kind: str,
        name: str,
        stage: int,
        microbatch: int,
        *,
        by_events: bool,
    ) -> None:
        self._recorder, self.kind, self.name = recorder, kind, name
        self._by_events = by_events
        self.stage, self.microbatch = stage, microbatch
        self._events: tuple[torch.cuda.Event, ...] | None = None

    def __enter__(self) -> None:
        if self._by_events:
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events[0].record()
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end_s = time.perf_counter()
        if self._events is not None:
            self._events[1].record()
        self._recorder.add(self, self._start_s, end_s, self._events)


def start_recorder(mesh: Mesh) -> Recorder | None:
    """Return a recorder if the environment asks for timelines."""
    folder = os.environ.get(TIMELINE_DIR)
    return Recorder(Path(folder), mesh) if folder else None


def _memory_counter(device: torch.device) -> Callable[[], int]:
    """Return what tells the bytes a device holds for this process; on a CPU its resident set."""
    if device.type == "cuda":
        # (`memory_allocated` is this after flattening all statistics: ten times as long.)
        stats = torch.cuda.memory_stats_as_nested_dict
        return lambda: int(stats(device)["allocated_bytes"]["all"]["current"])
    if sys.platform != "linux":
        return lambda: 0
    page_bytes = resource.getpagesize()
    statm = os.open("/proc/self/statm", os.O_RDONLY)  # stays open: opening takes most of the time
    return lambda: int(os.pread(statm, 64, 0).split()[1]) * page_bytes


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
                clock.fill_(time.perf_counter())
                dist.send(clock, rank, group=mesh.control)
            elif here == rank:
                asked_s = time.perf_counter()
                dist.send(clock, 0, group=mesh.control)
                dist.recv(clock, 0, group=mesh.control)
                round_s = time.perf_counter() - asked_s
                best = min(best, (round_s, clock.item() - asked_s - round_s / 2))
    return best[1]
