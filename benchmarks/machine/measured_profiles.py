"""How far a profile of this machine can be trusted.

Measures the machine twice and prints: how many records agree within 10%, by kind of record;
the error of predicting op shapes that were left out, a fifth at a time; the residuals of the
collectives' alpha-beta fits; whole blocks against the sums of their ops; that the number of
probes is the number of distinct signatures, whatever the depth of the model; and whether a
measurement killed at 20 random moments ends with the same records. Run it on an idle
machine (under 8 minutes by default): other work shows in the collectives.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.harness import ROOT, Result, benchmark, note
from planner.capture.source.capture_cache import load_graph
from planner.language.graph import ModelGraph
from profiles import Profile, load_profile, measure_profile
from profiles.lookup.families import BLOCK_TARGET, family_of
from profiles.lookup.fit import fit_ops
from profiles.lookup.op_model import query_of, record_key
from profiles.measure.grid import base_probes
from profiles.measure.signatures import blocks, signatures
from profiles.store import OPS_FILE

FOLDS = 5

Row = dict[str, Any]


@benchmark("measured_profiles", quick={"budget": 1.0, "nproc": 1, "kills": 0})
def measured_profiles(
    *,
    budget: Annotated[float, "seconds for each of two runs"] = 90.0,
    nproc: int = 2,
    model: Path = ROOT / "examples" / "gpt.py",
    kills: Annotated[int, "0: do not try"] = 20,
) -> Result:
    graph = load_graph(model)
    first, second = (measure(graph, nproc, budget) for _ in range(2))
    rows = list(agreement(first, second))
    notes = [count_signatures(graph, nproc)]
    for run in (first, second):
        rows += left_out(run)
        residuals = [fit.relative_error for fit in run.file.collective_fits]
        if residuals:
            notes.append(f"collective fits: median residual {np.median(residuals):.1%}")
        for direction, figure in run.file.block_correction.items():
            notes.append(f"blocks {direction}: x {figure.value:.2f} ({figure.detail})")
    if kills:
        notes.append(killed(model, graph, kills))
    return Result(rows, notes)


def measure(graph: ModelGraph, nproc: int, budget_s: float) -> Profile:
    """Return a profile of this machine, measured for one model."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_profile(
            folder,
            nproc=nproc,
            models=[graph],
            budget_s=budget_s,
            progress=lambda part, what: note(f"profile {part:4.0%} {what}"),
        )


def count_signatures(graph: ModelGraph, num_devices: int) -> str:
    """Say how many probes a model needs, and a model of sixteen times its blocks."""
    probes = signatures([graph], num_devices=num_devices)
    deep = signatures([replace(graph, blocks=graph.blocks * 16)], num_devices=num_devices)
    distinct = len({probe.key for probe in probes})
    return (
        f"{graph.name}: {len(probes)} probes, {distinct} distinct signatures; "
        f"16 times as deep: {len(deep)} probes"
    )


def agreement(first: Profile, second: Profile) -> Iterator[Row]:
    """Yield how many records of two runs lie within 10% of each other, by kind and of all."""
    known = by_signature(second)
    off = defaultdict(list)
    for key, record in by_signature(first).items():
        if key in known:
            difference = abs(record.seconds / known[key].seconds - 1)
            kind = family_of(record.target) if hasattr(record, "target") else "collectives"
            off[kind].append(difference)
            off["all"].append(difference)
    for kind in sorted(off, key=lambda kind: (kind == "all", kind)):
        found = np.array(off[kind])
        yield {
            "what": "in both runs",
            "kind": kind,
            "records": len(found),
            "within_10_pct": 100 * float((found < 0.1).mean()),
            "median_pct": 100 * float(np.median(found)),
        }


def by_signature(profile: Profile) -> dict:
    """Return every record by what it measured."""
    ops = {(record_key(r), r.arguments): r for r in profile.ops}
    messages = {(r.kind, r.num_bytes, r.ranks_per_node): r for r in profile.collectives}
    return ops | messages


def killed(model: Path, graph: ModelGraph, kills: int) -> str:
    """Kill -9 the command at random moments, run it to its end, and count its records."""
    chance = random.Random(0)
    probes = [*base_probes(), *signatures([graph], num_devices=1), *blocks([graph])]
    asked = {(record_key(query), p.arguments) for p in probes for query in p.queries}
    done, counts = 0, []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "profile"
        command = [sys.executable, "-m", "cli", "profile", str(model), "--out", str(folder)]
        command += ["--nproc", "1", "--device", "cpu"]
        # Moments are drawn from twice the time in which the first record comes.
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not num_records(folder) and process.poll() is None:
            time.sleep(0.1)
        longest_s = 2 * (time.monotonic() - begun)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while done < kills:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                process.wait(timeout=chance.uniform(0.0, longest_s))
                shutil.rmtree(folder)  # it came to its end: the next kills are of a new one
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                done += 1
            counts.append(num_records(folder))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        profile = load_profile(folder)
    keys = [(record_key(record), record.arguments) for record in profile.ops]
    same = "the same" if len(keys) == len(set(keys)) and set(keys) == asked else "NOT the same"
    return (
        f"killed {done} times, when there were {counts} records; resumed to {len(keys)}, "
        f"{same} as the {len(asked)} asked for"
    )


def num_records(folder: Path) -> int:
    """Return how many ops a measurement in progress has on disk."""
    path = folder / OPS_FILE
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def left_out(profile: Profile) -> Iterator[Row]:
    """Yield errors of predicting each fifth of the op shapes from the other four."""
    records = [r for r in profile.ops if r.target != BLOCK_TARGET]
    shapes = sorted({(r.target, r.shapes, r.arguments) for r in records}, key=str)
    order = np.random.default_rng(0).permutation(len(shapes))
    errors = defaultdict(list)
    for fold in range(FOLDS):
        out = {shapes[index] for index in order[fold::FOLDS]}
        seen = [r for r in records if (r.target, r.shapes, r.arguments) not in out]
        # Records are of the undisturbed machine, so answers are to be.
        changes = {"op_fits": fit_ops(seen), "typical_slowdown": {}}
        file = profile.file.model_copy(update=changes)
        model = Profile(file, seen, profile.collectives)
        for record in records:
            if (record.target, record.shapes, record.arguments) in out:
                seconds = model.op_seconds(query_of(record)).seconds
                error = abs(seconds / record.seconds - 1)
                errors[record.target, record.direction].append(error)
    every = [error for found in errors.values() for error in found]
    for (target, direction), found in [*sorted(errors.items()), (("all", ""), every)]:
        yield {
            "what": "left out",
            "kind": f"{target} {direction}".rstrip(),
            "records": len(found),
            "median_pct": 100 * float(np.median(found)),
        }
