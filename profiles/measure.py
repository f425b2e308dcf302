"""Measure this machine, or a cluster, into a profile directory.

Probes go heaviest first, each in worker ranks that all run it at once. After every probe
the records so far are written, so a kill loses at most the probe in flight, and the same
call goes on where the last one stopped. What budget is left at the end goes to the probes
whose uncertainty weighs most.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import ProfileError
from planner.graph import ModelGraph
from profiles.fit import MIN_SAMPLES_PER_TARGET
from profiles.grid import base_probes, collective_probes, standard_grid
from profiles.launchers import ClusterLauncher, Launcher, LocalLauncher, cluster_rank, serve
from profiles.probes import BlockProbe, CollectiveProbe, OpProbe
from profiles.profile import Profile
from profiles.records import COLLECTIVE_KINDS
from profiles.session import THREADS, Ranks, Session
from profiles.signatures import blocks, signatures
from profiles.store import PROFILE_FILE, check_writable, remove_session, write_profile_file
from profiles.summary import summarize
from profiles.surroundings import measure_surroundings
from profiles.topology import concrete_groups, describe_stragglers, groups_to_measure
from profiles.workers import ProbeFailed, WorkerGroup

Progress = Callable[[float, str], None]

PROBE_S = 0.2
"""Time per probe without a budget."""

LEAST_PROBE_S, MOST_PROBE_S = 0.02, 0.5
PROBE_TIMEOUT_S = 60.0

COLLECTIVE_SHARE = 0.35
"""Share of a budget for collectives; ops are more numerous and weigh more in a step."""

LEAST_SIZES = 3
"""So many sizes of every collective are measured, and one probe of every op, even if that
takes longer than the budget: a profile without them would be no profile."""

GOOD_STANDARD_ERROR = 0.02
"""A median this well known is not measured further."""

MOST_ROUNDS = 6


def measure_profile(
    out: str | Path,
    *,
    nproc: int,
    device: str = "cpu",
    models: Sequence[ModelGraph] = (),
    gpus: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Profile | None:
    """Measure with `nproc` ranks on this machine, write the profile to `out`, return it.

    Under torchrun, srun or mpirun every process calls this: rank 0 measures with one worker
    per rank, whatever `nproc` says; the others serve until it is done and return None.

    With models, measures each distinct op signature that a search of them on `gpus`
    devices (default: the ranks) can ask for; without, a standard grid. Records already in
    `out` are kept. Raises ProfileError when `out` holds another machine's records, can't
    be written, or the workers can't start.
    """
    place = cluster_rank(os.environ)
    if place is not None and place.rank > 0:
        serve(place)
        return None
    if nproc < 1:
        raise ProfileError(f"nproc={nproc} is not a number of processes; use at least 1")
    began = time.monotonic()
    directory = Path(out)
    check_writable(directory)
    launcher: Launcher = (
        LocalLauncher(nproc, device=device, threads=THREADS)
        if place is None
        else ClusterLauncher(place, device=device, threads=THREADS)
    )
    with WorkerGroup(launcher) as workers:
        try:
            about = workers.call({"task": "describe"}, timeout_s=PROBE_TIMEOUT_S)
        except ProbeFailed as error:
            raise ProfileError(f"can't measure on {device}: {error}") from None
        ranks = Ranks(about=tuple(about))
        session = Session.open(directory, ranks, device_type=device)
        run = _Run(
            session=session,
            workers=workers,
            began=began,
            deadline=None if budget_s is None else began + budget_s,
            progress=progress or (lambda fraction, doing: None),
        )
        num_devices = gpus or len(about)
        grid = signatures(models, num_devices=num_devices) if models else standard_grid(device)
        whole = blocks(models)
        missing_blocks = [p for p in whole if session.lacks_op(p)]
        missing_ops = [p for p in (*base_probes(), *grid) if session.lacks_op(p)]
        asked = collective_probes(groups_to_measure(ranks.nodes))
        missing = [p for p in asked if session.lacks_collective(p)]
        if not (missing_ops or missing or missing_blocks) and (directory / PROFILE_FILE).exists():
            remove_session(directory)
            return _loaded(directory)
        try:
            surroundings = measure_surroundings(workers, session, run.report)
        except ProbeFailed as error:
            raise ProfileError(f"can't measure the memory of a process: {error}") from None
        complete = run.measure(missing_ops, missing, missing_blocks)
    file = summarize(
        session,
        surroundings,
        blocks=whole,
        complete=complete,
        stragglers=describe_stragglers(run.rank_seconds, ranks.hosts) if run.rank_seconds else [],
    )
    write_profile_file(directory, file)
    remove_session(directory)
    return Profile(file, session.ops, session.collectives)


def _loaded(directory: Path) -> Profile:
    from profiles.catalog import load_profile

    return load_profile(directory)


@dataclass
class _Run:
    """One pass over the probes. Mutable: it counts time and collects samples."""

    session: Session
    workers: WorkerGroup
    began: float
    deadline: float | None
    progress: Progress
    total: int = 0
    done: int = 0
    samples: dict[OpProbe | BlockProbe, dict[tuple[str, str], list[float]]] = field(
        default_factory=dict
    )
    rank_seconds: dict[int, float] = field(default_factory=dict)

    def measure(
        self,
        ops: Sequence[OpProbe],
        collectives: Sequence[CollectiveProbe],
        blocks: Sequence[BlockProbe],
    ) -> bool:
        """Measure and return whether everything asked for was reached."""
        self.total = len(ops) + len(collectives) + len(blocks)
        basic = [p for p in ops if p.weight == float("inf")]
        for probe in basic:
            self._time_op(probe, MOST_PROBE_S / 2)
        postponed = self._collectives(collectives)
        rest = _spanning_first(p for p in ops if p.weight < float("inf"))
        # Blocks before ops: they are few, and correct whatever the ops add up to.
        every: list[OpProbe | BlockProbe] = [*blocks, *rest]
        firsts = _first_of_each_target(rest)
        for index, item in enumerate(every):
            if item not in firsts and 8 * _expected_seconds(item) > 0.3 * self._left():
                postponed += 1
                continue
            self._time_op(item, self._share(self._left(), len(every) - index))
        self._refine(rest)
        return postponed == 0

    def report(self, doing: str) -> None:
        """Tell how far the run is, by budget if there is one, else by probes."""
        left = max(self.total - self.done, 0)
        fraction = self.done / max(self.total, 1)
        if self.deadline is not None:
            fraction = (time.monotonic() - self.began) / (self.deadline - self.began)
        self.progress(min(fraction, 1.0), f"{doing} ({left} probes left)" if left else doing)

    def _collectives(self, probes: Sequence[CollectiveProbe]) -> int:
        """Measure collectives within their share; return how many there was no time for."""
        reserve = (1 - COLLECTIVE_SHARE) * self._left() if self.deadline else 0.0
        for index, probe in enumerate(probes):
            left = self._left() - reserve
            if left <= 0 and index >= LEAST_SIZES * len(COLLECTIVE_KINDS):
                return len(probes) - index
            self._time_collective(probe, self._share(left, len(probes) - index))
        return 0

    def _refine(self, probes: Sequence[OpProbe]) -> None:
        """Spend what is left of a budget where weight times uncertainty is largest."""
        rounds: Counter[OpProbe] = Counter()
        while self.deadline is not None and self._left() > MOST_PROBE_S:
            open_ = [p for p in probes if rounds[p] < MOST_ROUNDS and self._uncertainty(p) > 0]
            if not open_:
                return
            worst = max(open_, key=self._uncertainty)
            rounds[worst] += 1
            self._time_op(worst, MOST_PROBE_S / 2)

    def _uncertainty(self, probe: OpProbe) -> float:
        """Return weight times relative standard error of the median; 0 if good enough."""
        found = self.samples.get(probe, {}).items()
        cold = [samples for (_, name), samples in found if not name.endswith("_warm")]
        worst = max(map(_standard_error, cold), default=0.0)
        return 0.0 if worst < GOOD_STANDARD_ERROR else worst * probe.weight

    def _time_op(self, probe: OpProbe | BlockProbe, seconds: float) -> None:
        answers = self._call(probe, {"task": "op", "probe": probe.to_json(), "seconds": seconds})
        if not answers:
            return
        samples = self.samples.setdefault(probe, {})
        for kind, ranks in self.session.ranks.kinds.items():
            for name in answers[0]:
                found = samples.setdefault((kind, name), [])
                found += [s for rank in ranks for s in answers[rank][name]]
        self.session.add_op(probe, samples)
        if probe.weight == float("inf") and probe.forward.flop > probe.forward.num_bytes:
            self.rank_seconds = {
                rank: float(np.median(answer["forward"])) for rank, answer in enumerate(answers)
            }

    def _time_collective(self, probe: CollectiveProbe, seconds: float) -> None:
        groups = concrete_groups(probe.group, self.session.ranks.nodes)
        task = {
            "task": "collective",
            "kind": probe.kind,
            "num_bytes": probe.num_bytes,
            "groups": groups,
            "seconds": seconds,
        }
        samples = [s for answer in self._call(probe, task) for s in answer["seconds"]]
        if samples:
            self.session.add_collective(probe, samples, concurrent_groups=len(groups))

    def _call(
        self, probe: OpProbe | BlockProbe | CollectiveProbe, task: dict[str, Any]
    ) -> list[dict[str, Any]]:
        self.report(str(probe))
        self.done += 1
        try:
            return self.workers.call(task, timeout_s=PROBE_TIMEOUT_S + 2 * task["seconds"])
        except ProbeFailed as error:
            self.session.skip(probe, error)
            return []

    def _left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def _share(self, seconds: float, count: int) -> float:
        """Return the sampling time of one of `count` probes; making inputs takes the rest."""
        if self.deadline is None:
            return PROBE_S
        return min(max(0.5 * seconds / max(count, 1), LEAST_PROBE_S), MOST_PROBE_S)


def _standard_error(samples: Sequence[float]) -> float:
    if not samples:
        return 0.0
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle / np.sqrt(len(samples)))


def _expected_seconds(probe: OpProbe | BlockProbe) -> float:
    """Guess, before measuring, at a rate that any machine of today has."""
    return sum(q.flop / 2e10 + q.num_bytes / 5e9 for q in probe.queries)


def _first_of_each_target(probes: Sequence[OpProbe]) -> set[OpProbe | BlockProbe]:
    """Return the heaviest probe of every target: measured whatever the budget."""
    return set({probe.op.target: probe for probe in reversed(probes)}.values())


def _spanning_first(probes: Iterable[OpProbe]) -> list[OpProbe]:
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
