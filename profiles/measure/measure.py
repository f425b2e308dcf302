"""Measure this machine, or a cluster, into a profile directory.

Each probe runs in worker ranks that all run it at once, and is visited several times
(`rounds`). After every visit the records so far are written, so a kill loses at most the visit
in flight, and the same call goes on where the last one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from planner.errors import ProfileError
from planner.language.graph import ModelGraph
from profiles.lookup.topology import groups_to_measure
from profiles.measure.grid import base_probes, collective_probes, standard_grid
from profiles.measure.nodes.launchers import ClusterLauncher, Launcher, LocalLauncher, join, serve
from profiles.measure.probes import OpProbe
from profiles.measure.rounds import VISIT_TIMEOUT_S, Asked, Progress, Rounds
from profiles.measure.session import THREADS, Ranks, Session
from profiles.measure.signatures import blocks, signatures
from profiles.measure.summary import summarize
from profiles.measure.timing.surroundings import measure_again, measure_surroundings
from profiles.measure.workers import ProbeFailed, WorkerGroup
from profiles.profile import Profile
from profiles.store import PROFILE_FILE, check_writable, remove_session, write_profile_file

MESSAGE_SHARE = 32
"""Messages grow up to 1 GiB, or to this part of a rank's memory."""

_AGAIN_SHARE = 0.3
"""The most of a budget that is kept for further visits to what a machine's drift shows in."""
_LATE_SHARE = 0.1
"""These visits may end so much of a budget late."""


def measure_profile(
    out: str | Path,
    *,
    nproc: int,
    device: str = "cpu",
    models: Sequence[ModelGraph] = (),
    gpus: int | None = None,
    grid: bool = False,
    budget_s: float | None = None,
    began: float | None = None,
    compiled: bool | None = None,
    progress: Progress | None = None,
    num_nodes: int = 1,
    rendezvous: str = "",
    command: str = "",
) -> Profile | None:
    """Measure with `nproc` ranks on this machine, write the profile to `out`, return it.

    On a cluster every process calls this: one for each rank or each node that torchrun, srun,
    mpirun or a PyTorchJob started, or one on each of `num_nodes` nodes, `rendezvous` being the
    host:port of one of them. Where a process is a node it has `nproc` ranks. The first process
    measures; the others serve until it is done and return None.

    With models, measures each distinct op signature that a search of them on `gpus` devices
    (default: the ranks) may need, and whole blocks, also `compiled` (default: on GPUs); without, or
    with `grid`, a standard grid. A budget counts from `began`, in seconds of the monotonic clock
    (default: now), when the work that comes before began; what no profile is without is measured
    even where it is too short. `command` is what was called, for the notes. Records already in
    `out` are kept. Raises ProfileError when `out` holds another machine's records, can't be
    written, or the workers can't start.
    """
    if nproc < 1:
        raise ProfileError(f"nproc={nproc} is not a number of processes; use at least 1")
    member = join(nproc, num_nodes=num_nodes, rendezvous=rendezvous)
    if member is not None and member.number > 0:
        serve(member)
        return None
    began = time.monotonic() if began is None else began
    directory = Path(out)
    check_writable(directory)
    launcher: Launcher = (
        LocalLauncher(nproc, device=device, threads=THREADS)
        if member is None
        else ClusterLauncher(member, device=device, threads=THREADS)
    )
    with WorkerGroup(launcher) as workers:
        try:
            about = workers.call({"task": "describe"}, timeout_s=VISIT_TIMEOUT_S)
        except ProbeFailed as error:
            raise ProfileError(f"can't measure on {device}: {error}") from None
        ranks = Ranks(about=tuple(about))
        session = Session.open(directory, ranks, device_type=device)
        run = Rounds(
            session=session,
            workers=workers,
            began=began,
            deadline=None if budget_s is None else began + budget_s,
            progress=progress or (lambda fraction, doing: None),
            libraries=tuple(sorted({name for graph in models for name in graph.libraries})),
        )
        wanted: list[OpProbe] = [*base_probes()]
        if models:
            wanted += signatures(models, num_devices=gpus or len(about))
        if grid or not models:
            has = {kind: all(answer[kind] for answer in about) for kind in ("float8", "blocks")}
            wanted += standard_grid(device, **has)
        # Compiling a block for a CPU takes longer than measuring all its ops.
        whole = blocks(models, compiled=device == "cuda" if compiled is None else compiled)
        asked = Asked.of(
            _distinct(wanted),
            blocks=whole,
            collectives=collective_probes(
                groups_to_measure(ranks.nodes), most_bytes=ranks.memory_bytes / MESSAGE_SHARE
            ),
            session=session,
        )
        if not asked and (directory / PROFILE_FILE).exists():
            remove_session(directory)
            return _loaded(directory)
        before = time.monotonic()
        try:
            surroundings = measure_surroundings(workers, session, run.report)
        except ProbeFailed as error:
            raise ProfileError(f"can't measure the memory of a process: {error}") from None
        end, took_s = run.deadline, time.monotonic() - before
        if end is not None:  # most of it comes once more, if there is time
            run.deadline = end - min(took_s, _AGAIN_SHARE * (end - began))
        complete = run.measure(asked)
        if end is None or time.monotonic() + took_s <= end + _LATE_SHARE * (end - began):
            surroundings = measure_again(surroundings, workers, session, run.report)
    file = summarize(
        session,
        surroundings,
        blocks=whole,
        complete=complete,
        stragglers=run.stragglers(),
        command=command,
    )
    write_profile_file(directory, file)
    remove_session(directory)
    return Profile(file, tuple(session.ops.values()), tuple(session.collectives.values()))


def _loaded(directory: Path) -> Profile:
    from profiles.catalog import load_profile

    return load_profile(directory)


def _distinct(probes: Sequence[OpProbe]) -> list[OpProbe]:
    """Return the first probe of every signature."""
    found: dict[tuple, OpProbe] = {}
    for probe in probes:
        found.setdefault(probe.key, probe)
    return list(found.values())
