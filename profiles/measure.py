"""Measure this machine into a profile directory; the same call resumes where it stopped.

Probes go heaviest first, each in worker ranks that all run it at once. After every probe
the records so far are written, so a kill loses at most the probe in flight. What budget is
left then goes to the probes whose uncertainty weighs most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import ProfileError
from planner.graph import ModelGraph
from profiles.fit import MIN_SAMPLES_PER_TARGET
from profiles.grid import base_probes, collective_probes, standard_grid
from profiles.op_model import record_key
from profiles.probes import CollectiveProbe, OpProbe
from profiles.profile import Profile
from profiles.records import CollectiveRecord, OpRecord, SkippedProbe
from profiles.signatures import signatures
from profiles.store import (
    COLLECTIVES_FILE,
    OPS_FILE,
    check_writable,
    read_collectives,
    read_ops,
    read_session,
    remove_session,
    write_collectives,
    write_ops,
    write_profile_file,
    write_session,
)
from profiles.summary import summarize
from profiles.workers import ProbeFailed, WorkerGroup

Progress = Callable[[float, str], None]

PROBE_S = 0.2
"""Time per probe without a budget."""

LEAST_PROBE_S, MOST_PROBE_S = 0.02, 0.5
PROBE_TIMEOUT_S = 60.0

COLLECTIVE_SHARE = 0.35
"""Share of a budget for collectives, from the ratio in which they enter a training step."""

GOOD_STANDARD_ERROR = 0.02
"""A median this well known is not measured further."""


def measure_profile(
    out: str | Path,
    *,
    nproc: int,
    device: str = "cpu",
    models: Sequence[ModelGraph] = (),
    gpus: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure with `nproc` ranks on this machine, write the profile to `out`, return it.

    With models, measures each distinct op signature that a search of them on `gpus`
    devices (default: nproc) can ask for; without, a standard grid. Records already in
    `out` are kept. Raises ProfileError when `out` holds another machine's records, can't
    be written, or the workers can't start.
    """
    if nproc < 1:
        raise ProfileError(f"nproc={nproc} is not a number of processes; use at least 1")
    began = time.monotonic()
    directory = Path(out)
    check_writable(directory)
    with WorkerGroup(nproc, device=device, threads=1) as workers:
        try:
            about = workers.call({"task": "describe"}, timeout_s=PROBE_TIMEOUT_S)
        except ProbeFailed as error:
            raise ProfileError(f"can't measure on {device}: {error}") from None
        session = _Session.open(directory, about=about, device=device, nproc=nproc)
        memory = _measure_memory(workers, nproc)
        ops: list[OpProbe] = [*base_probes()]
        ops += signatures(models, num_devices=gpus or nproc) if models else standard_grid(device)
        collectives = collective_probes(nproc)
        run = _Run(
            session=session,
            workers=workers,
            nproc=nproc,
            deadline=None if budget_s is None else began + budget_s,
            began=began,
            progress=progress or (lambda fraction, doing: None),
        )
        rest = _measure_steps(workers, nproc)
        complete = run.measure(ops, collectives)
    file = summarize(
        session.ops,
        session.collectives,
        about=about,
        device_type=device,
        nproc=nproc,
        memory=memory,
        optimizer=rest.optimizer,
        overlap=rest.overlap,
        skipped=session.skipped,
        complete=complete,
        conditions=session.conditions,
    )
    write_profile_file(directory, file)
    remove_session(directory)
    return Profile(file, session.ops, session.collectives)


def _measure_memory(workers: WorkerGroup, nproc: int) -> dict[str, float]:
    """Return the largest context and overhead of any rank, communicators included."""
    ranks = [list(range(nproc))]
    task = {"task": "collective", "kind": "all_reduce", "num_bytes": 4096, "groups": ranks}
    if nproc > 1:
        workers.call({**task, "seconds": 0.0}, timeout_s=PROBE_TIMEOUT_S)
    answers = workers.call({"task": "memory"}, timeout_s=PROBE_TIMEOUT_S)
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


OPTIMIZER_SHAPES = ((1, 2**10), (32, 2**10), (1, 2**21), (16, 2**17))
"""(number of tensors, elements of each): many small ones and few large ones."""


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """Medians of what is not one op: AdamW steps, and slowdown factors of overlap."""

    optimizer: Sequence[tuple[bool, int, int, float]]
    overlap: Mapping[str, float]


def _measure_steps(workers: WorkerGroup, nproc: int) -> StepSamples:
    """Time AdamW on plain and sharded parameters, and overlap; what fails is left out."""
    optimizer = []
    for sharded, (num_tensors, numel) in product((False, True), OPTIMIZER_SHAPES):
        task = {"task": "optimizer", "sharded": sharded, "seconds": 0.05}
        task |= {"num_tensors": num_tensors, "numel": numel}
        with suppress(ProbeFailed):
            answers = workers.call(task, timeout_s=PROBE_TIMEOUT_S)
            samples = [s for answer in answers for s in answer["seconds"]]
            optimizer.append((sharded, num_tensors, numel, float(np.median(samples))))
    overlap: dict[str, float] = {}
    if nproc > 1:
        with suppress(ProbeFailed):
            answers = workers.call({"task": "overlap"}, timeout_s=PROBE_TIMEOUT_S)
            overlap = {part: max(a[part] for a in answers) for part in answers[0]}
    return StepSamples(optimizer=optimizer, overlap=overlap)


@dataclass
class _Session:
    """Records so far, kept in step with the files. Mutable: it grows with every probe."""

    directory: Path
    conditions: dict[str, Any]
    ops: list[OpRecord]
    collectives: list[CollectiveRecord]
    skipped: list[SkippedProbe] = field(default_factory=list)

    @classmethod
    def open(
        cls, directory: Path, *, about: Sequence[dict[str, Any]], device: str, nproc: int
    ) -> _Session:
        first = about[0]
        kinds = sorted({answer["device"] for answer in about})
        conditions = {
            "device": " + ".join(kinds),
            "device_type": device,
            "driver": first["driver"],
            "torch": first["torch"],
            "nproc": nproc,
            "threads": 1,
        }
        known = read_session(directory)
        if known is not None and known != conditions:
            differing = [key for key in conditions if known.get(key) != conditions[key]]
            key = differing[0] if differing else "conditions"
            raise ProfileError(
                f"{directory} holds measurements with {key} {known.get(key)!r}, but here it is "
                f"{conditions[key]!r}; give another --out, or delete {directory}"
            )
        write_session(directory, conditions)
        has = directory / OPS_FILE, directory / COLLECTIVES_FILE
        session = cls(
            directory=directory,
            conditions=conditions,
            ops=list(read_ops(directory)) if has[0].exists() else [],
            collectives=list(read_collectives(directory)) if has[1].exists() else [],
        )
        session.save()
        return session

    def save(self) -> None:
        write_ops(self.directory, self.ops)
        write_collectives(self.directory, self.collectives)

    def provenance(self, samples: Sequence[float]) -> dict[str, Any]:
        low, middle, high = np.percentile(samples, [25, 50, 75])
        return {
            "device": self.conditions["device"],
            "driver": self.conditions["driver"],
            "torch": self.conditions["torch"],
            "threads": self.conditions["threads"],
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "repeats": len(samples),
            "spread": float((high - low) / middle),
            "seconds": float(middle),
        }


@dataclass
class _Run:
    """One pass over the probes. Mutable: it counts time and collects samples."""

    session: _Session
    workers: WorkerGroup
    nproc: int
    deadline: float | None
    began: float
    progress: Progress
    samples: dict[Any, list[float]] = field(default_factory=dict)
    total: int = 0
    done: int = 0

    def measure(self, ops: Sequence[OpProbe], collectives: Sequence[CollectiveProbe]) -> bool:
        """Measure what is missing; return whether everything asked for has an answer."""
        known_ops = {(record_key(r), r.arguments) for r in self.session.ops}
        known_collectives = {_collective_key(r) for r in self.session.collectives}
        ops = [
            p for p in ops if any((record_key(q), p.arguments) not in known_ops for q in p.queries)
        ]
        collectives = [p for p in collectives if _collective_key(p) not in known_collectives]
        self.total = len(ops) + len(collectives)
        basic = [p for p in ops if p.weight == float("inf")]
        rest = _spanning_first([p for p in ops if p.weight < float("inf")])
        for op in basic:
            self._time_op(op, MOST_PROBE_S / 2)
        postponed = self._collectives(collectives)
        for index, op in enumerate(rest):
            seconds = self._share(self._left(), len(rest) - index)
            if 8 * _expected_seconds(op) > 0.3 * self._left():
                postponed += 1
                continue
            self._time_op(op, seconds)
        self._refine(ops)
        return postponed == 0

    def _collectives(self, probes: Sequence[CollectiveProbe]) -> int:
        """Measure collectives within their share; return how many there was no time for."""
        reserve = (1 - COLLECTIVE_SHARE) * self._left() if self.deadline else 0.0
        for index, probe in enumerate(probes):
            left = self._left() - reserve
            if left <= 0:
                return len(probes) - index
            self._time_collective(probe, self._share(left, len(probes) - index))
        return 0

    def _refine(self, ops: Sequence[OpProbe]) -> None:
        """Spend what is left of a budget where weight times uncertainty is largest."""
        if self.deadline is None:
            return
        rounds = {probe.key: 0 for probe in ops}
        while self._left() > MOST_PROBE_S:
            worst = max(ops, key=self._uncertainty, default=None)
            if worst is None or self._uncertainty(worst) == 0.0 or rounds[worst.key] > 5:
                return
            rounds[worst.key] += 1
            self._time_op(worst, MOST_PROBE_S / 2)

    def _uncertainty(self, probe: OpProbe) -> float:
        """Return weight times relative standard error of the median; 0 if good enough."""
        worst = 0.0
        for query in probe.queries:
            samples = self.samples.get((query.direction, probe.key))
            if samples:
                low, middle, high = np.percentile(samples, [25, 50, 75])
                worst = max(worst, float((high - low) / middle / np.sqrt(len(samples))))
        return 0.0 if worst < GOOD_STANDARD_ERROR else worst * probe.weight

    def _time_op(self, probe: OpProbe, seconds: float) -> None:
        task = {"task": "op", "probe": probe.to_json(), "seconds": seconds}
        answers = self._call(str(probe), task)
        for query in probe.queries if answers else ():
            key = query.direction, probe.key
            samples = self.samples.setdefault(key, [])
            samples += [s for answer in answers for s in answer[query.direction]]
            if not samples:
                continue
            record = OpRecord(
                target=query.target,
                shapes=query.shapes,
                dtype=query.dtype,
                direction=query.direction,
                arguments=probe.arguments,
                flop=query.flop,
                num_bytes=query.num_bytes,
                **self.session.provenance(samples),
            )
            same = record_key(record), record.arguments
            kept = [r for r in self.session.ops if (record_key(r), r.arguments) != same]
            self.session.ops = [*kept, record]
        if answers:
            write_ops(self.session.directory, self.session.ops)

    def _time_collective(self, probe: CollectiveProbe, seconds: float) -> None:
        size = probe.group.size
        groups = [list(range(at, at + size)) for at in range(0, self.nproc - size + 1, size)]
        task = {
            "task": "collective",
            "kind": probe.kind,
            "num_bytes": probe.num_bytes,
            "groups": groups,
            "seconds": seconds,
        }
        answers = self._call(str(probe), task)
        samples = [s for answer in answers for s in answer["seconds"]]
        if samples:
            record = CollectiveRecord(
                kind=probe.kind,
                num_bytes=probe.num_bytes,
                ranks_per_node=probe.group.ranks_per_node,
                num_nodes=probe.group.num_nodes,
                concurrent_groups=len(groups),
                **self.session.provenance(samples),
            )
            self.session.collectives.append(record)
            write_collectives(self.session.directory, self.session.collectives)

    def _call(self, name: str, task: dict[str, Any]) -> list[dict[str, Any]]:
        fraction = self.done / max(self.total, 1)
        if self.deadline is not None:
            fraction = (time.monotonic() - self.began) / (self.deadline - self.began)
        self.progress(min(fraction, 1.0), f"{name} ({max(self.total - self.done, 0)} left)")
        self.done += 1
        try:
            return self.workers.call(task, timeout_s=PROBE_TIMEOUT_S + 2 * task["seconds"])
        except ProbeFailed as error:
            self.session.skipped.append(SkippedProbe(probe=name, reason=str(error)))
            return []

    def _left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def _share(self, seconds: float, count: int) -> float:
        """Return the sampling time of one of `count` probes; making inputs takes the rest."""
        if self.deadline is None:
            return PROBE_S
        return min(max(0.5 * seconds / max(count, 1), LEAST_PROBE_S), MOST_PROBE_S)


def _spanning_first(probes: Sequence[OpProbe]) -> list[OpProbe]:
    """Return the probes, heaviest first, but a few of each target before all others.

    A short budget then leaves no target without measurements to go by.
    """
    seen: Counter[tuple[str, str]] = Counter()
    order: list[tuple[bool, int, OpProbe]] = []
    for probe in probes:
        kind = probe.forward.target, probe.forward.dtype
        order.append((seen[kind] >= MIN_SAMPLES_PER_TARGET, len(order), probe))
        seen[kind] += 1
    return [probe for _, _, probe in sorted(order, key=lambda entry: entry[:2])]


def _collective_key(item: CollectiveProbe | CollectiveRecord) -> tuple:
    if isinstance(item, CollectiveProbe):
        group = item.group
        return item.kind, item.num_bytes, group.ranks_per_node, group.num_nodes
    return item.kind, item.num_bytes, item.ranks_per_node, item.num_nodes


def _expected_seconds(probe: OpProbe) -> float:
    """Guess, before measuring, at a rate that any machine of today has."""
    return sum(q.flop / 2e10 + q.num_bytes / 5e9 for q in probe.queries)
