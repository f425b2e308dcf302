"""What is measured once beside ops and collectives: memory, optimizer, overlap, links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np

from profiles.lookup.topology import (
    PAIR_LATENCY_BYTES,
    describe_links,
    describe_slow_links,
    describe_slow_nodes,
)
from profiles.measure.driver import gpu_links
from profiles.measure.session import Session
from profiles.measure.timing.link_timing import measure_node_links, measure_pairs, time_groups
from profiles.measure.visits import over_ranks
from profiles.measure.workers import ProbeFailed, WorkerGroup
from profiles.records import HostWork, NodeLinkRecord, StepWork, ZeroWork

TIMEOUT_S = 60.0
HOST_COPIES = ("host_to_device", "device_to_host")

STEP_SHAPES = ((1, 2**10), (32, 2**10), (1, 2**21), (16, 2**17))
"""(number of tensors, elements of each): many small ones and few large ones."""

STEP_ROUNDS = 2
"""Visits to each step work, in rounds, before the ops and after them again: several moments
are steadier than one."""

ZERO_SHAPES = ((1, 2**10), (16, 2**10), (1, 2**19), (16, 2**15))
"""The same for a block's parameters."""

SUSTAINED_S = 8.0
"""A GPU's power follows its load at once, its heat within seconds."""

_SAMPLING_S = 0.03

_ZERO_SAMPLING_S = 0.15
"""A sample runs blocks with and without FSDP2, and takes tens of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Seconds of one kind of work over `num_tensors` tensors of `numel` elements, in each visit.

    `paces` are the light work's beside each visit, as the host's time for each tensor is what
    most of it takes; empty on GPUs.
    """

    work: StepWork
    num_tensors: int
    numel: int
    visits: tuple[float, ...]
    paces: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is measured beside ops and collectives; numbers are medians where nothing is said."""

    context_bytes: float
    """Memory of a rank before its first tensor: of the rank with the most."""
    allocator_overheads: tuple[float, ...]
    """Peak memory held over peak bytes of live tensors, minus 1, of each rank and round."""
    launch_s: float | None
    """Host seconds to issue one op, where the host runs ahead of the device."""
    host_work: Mapping[HostWork, float]
    """Host seconds of what takes longer, there."""
    sustained: float | None
    """Seconds of a product under load that goes on over those of one after a gap, on a GPU: of the
    rank that slows most."""
    steps: tuple[StepSample, ...]
    """Work of a step beside its blocks."""
    overlap: Mapping[str, float]
    """Factors by which compute and communication slow while both run."""
    waits: tuple[tuple[tuple[float, float, float], ...], ...]
    """By round and length of compute: seconds of compute between collectives, those by which a
    collective takes longer for it, and those by which it takes longer still inside a block
    (`wait_timing.time_waits`)."""
    links: tuple[str, ...]
    """Lines about links between ranks, for people."""
    node_links: tuple[NodeLinkRecord, ...]
    """Links between nodes."""
    findings: tuple[str, ...]
    """Lines about links that are slow."""


def measure_surroundings(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> Surroundings:
    """Measure all of it. What fails is noted in the session as skipped, except memory,
    without which nothing fits: that raises ProbeFailed.
    """
    everyone = list(range(len(session.ranks.about)))
    report("memory of a process")
    if len(everyone) > 1:  # communicators take memory from their first message on
        time_groups(workers, "all_reduce", PAIR_LATENCY_BYTES, [everyone])
    memory = workers.call({"task": "memory"}, timeout_s=TIMEOUT_S)
    pairs = measure_pairs(workers, session, report)
    node_links = measure_node_links(workers, session, report)
    hosts = session.ranks.hosts
    links = describe_links(pairs, hosts) if pairs else []
    return Surroundings(
        context_bytes=max(answer["context_bytes"] for answer in memory),
        allocator_overheads=tuple(o for a in memory for o in a["allocator_overheads"]),
        launch_s=_launch(workers, session) if _on_gpu(session) else None,
        host_work=_host_work(workers, session, report) if _on_gpu(session) else {},
        sustained=_sustained(workers, session, report) if _on_gpu(session) else None,
        steps=_steps_and_zero(workers, session, report),
        overlap=_overlap(workers, session, report) if len(everyone) > 1 else {},
        waits=_waits(workers, session, report) if len(everyone) > 1 else (),
        links=(*links, *(gpu_links() if _on_gpu(session) else [])),
        node_links=node_links,
        findings=(*describe_slow_nodes(node_links), *describe_slow_links(pairs, hosts)),
    )


def measure_again(
    first: Surroundings, workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> Surroundings:
    """Return the surroundings with further visits to what a machine's drift shows in: step work
    and waits.
    """
    later = {
        (sample.work, sample.num_tensors, sample.numel): sample
        for sample in _steps_and_zero(workers, session, report)
    }
    steps = []
    for sample in first.steps:
        again = later.get((sample.work, sample.num_tensors, sample.numel))
        if again is not None:
            visits, paces = sample.visits + again.visits, sample.paces + again.paces
            sample = replace(sample, visits=visits, paces=paces)
        steps.append(sample)
    waits = _waits(workers, session, report) if first.waits else ()
    return replace(first, steps=tuple(steps), waits=first.waits + waits)


def _on_gpu(session: Session) -> bool:
    return session.conditions["device_type"] == "cuda"


def _steps_and_zero(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> tuple[StepSample, ...]:
    on_gpu = _on_gpu(session)
    steps = _steps(workers, session, report, on_gpu=on_gpu)
    # A GPU's host runs ahead of it with FSDP2's work.
    if len(session.ranks.about) > 1 and not on_gpu:
        steps += _zero_work(workers, session, report)
    return steps


def _launch(workers: WorkerGroup, session: Session) -> float | None:
    try:
        answers = workers.call({"task": "launch"}, timeout_s=TIMEOUT_S)
    except ProbeFailed as error:
        session.skip("host time of one op", error)
        return None
    return _median(answers, "seconds")


def _host_work(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> dict[HostWork, float]:
    report("host time of products and redistributions")
    try:
        answers = workers.call({"task": "host"}, timeout_s=TIMEOUT_S)
    except ProbeFailed as error:
        session.skip("host time of products and redistributions", error)
        return {}
    return {kind: _median(answers, kind) for kind in get_args(HostWork)}


def _sustained(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> float | None:
    report("products under load that goes on")
    try:
        answers = workers.call(
            {"task": "sustained", "seconds": SUSTAINED_S}, timeout_s=TIMEOUT_S + SUSTAINED_S
        )
    except ProbeFailed as error:
        session.skip("products under load that goes on", error)
        return None
    return max(_median([each], "sustained") / _median([each], "short") for each in answers)


def _steps(
    workers: WorkerGroup, session: Session, report: Callable[[str], None], *, on_gpu: bool
) -> tuple[StepSample, ...]:
    """Measure the work of a step beside its blocks; on a CPU nothing is copied from a host."""
    kinds = [
        work
        for work in get_args(StepWork)
        if work not in get_args(ZeroWork) and (on_gpu or work not in HOST_COPIES)
    ]
    found: _Visits = {}
    failed = set()
    for _, work, (num_tensors, numel) in product(range(STEP_ROUNDS), kinds, STEP_SHAPES):
        key = work, num_tensors, numel
        if key in failed:
            continue
        report(f"{work} over {num_tensors} tensors")
        task = {
            "task": "step",
            "work": work,
            "num_tensors": num_tensors,
            "numel": numel,
            "seconds": _SAMPLING_S,
        }
        try:
            answers = workers.call(task, timeout_s=TIMEOUT_S)
        except ProbeFailed as error:
            failed.add(key)
            session.skip(f"{work} over {num_tensors} tensors of {numel}", error)
            continue
        found.setdefault(key, []).append(_visit(answers, "seconds"))
    return _step_samples(found)


def _zero_work(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> tuple[StepSample, ...]:
    """Measure FSDP2's own work for a block."""
    found: _Visits = {}
    for _, (num_tensors, numel) in product(range(STEP_ROUNDS), ZERO_SHAPES):
        report(f"ZeRO of a block of {num_tensors} tensors")
        task = {
            "task": "zero",
            "num_tensors": num_tensors,
            "numel": numel,
            "seconds": _ZERO_SAMPLING_S,
        }
        try:
            answers = workers.call(task, timeout_s=TIMEOUT_S)
        except ProbeFailed as error:
            session.skip(f"ZeRO of a block of {num_tensors} tensors of {numel}", error)
            return ()
        for work in get_args(ZeroWork):
            found.setdefault((work, num_tensors, numel), []).append(_visit(answers, work))
    return _step_samples(found)


_Visits = dict[tuple[StepWork, int, int], list[tuple[float, float | None]]]
"""By work, number and size of tensors: seconds of each visit, and the pace beside it."""


def _visit(
    answers: Sequence[Mapping[str, Sequence[float]]], part: str
) -> tuple[float, float | None]:
    return over_ranks(
        [float(np.median(answer[part])) for answer in answers],
        [float(np.median(answer["light"])) for answer in answers if answer["light"]],
    )


def _median(answers: Sequence[Mapping[str, Sequence[float]]], part: str) -> float:
    """The median of all ranks' seconds."""
    return float(np.median([seconds for answer in answers for seconds in answer[part]]))


def _step_samples(found: _Visits) -> tuple[StepSample, ...]:
    """One sample for each work and shape, with the visits of its rounds."""
    return tuple(
        StepSample(
            work=work,
            num_tensors=num_tensors,
            numel=numel,
            visits=tuple(seconds for seconds, _ in visits),
            paces=tuple(pace for _, pace in visits if pace is not None),
        )
        for (work, num_tensors, numel), visits in found.items()
    )


def _waits(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> tuple[tuple[tuple[float, float, float], ...], ...]:
    """Return a round's mean over ranks for each length of compute, for each round."""
    rounds = []
    for _ in range(STEP_ROUNDS):
        report("ranks that wait for each other")
        try:
            answers = workers.call({"task": "waits"}, timeout_s=TIMEOUT_S)
        except ProbeFailed as error:
            session.skip("ranks that wait for each other", error)
            return ()
        # (ranks, lengths, 3): the rank that is there first waits and the last does not, so the mean
        # over ranks is what each loses.
        compute_s, wait_s, inside_s = np.mean(np.array(answers), axis=0).T.tolist()
        rounds.append(tuple(zip(compute_s, wait_s, inside_s, strict=True)))
    return tuple(rounds)


def _overlap(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> dict[str, float]:
    report("compute and communication together")
    try:
        answers = workers.call({"task": "overlap"}, timeout_s=TIMEOUT_S)
    except ProbeFailed as error:
        session.skip("overlap", error)
        return {}
    return {part: float(np.median([a[part] for a in answers])) for part in answers[0]}
