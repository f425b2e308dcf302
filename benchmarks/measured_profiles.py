"""How far a profile of this machine can be trusted.

    python -m benchmarks.measured_profiles [--budget 90] [--nproc 2] [--model examples/gpt.py]

Measures the machine twice and prints: how many records agree within 10%; the error of
predicting op shapes that were left out, a fifth at a time; the residuals of the
collectives' alpha-beta fits; whole blocks against the sums of their ops; and that the
number of probes is the number of distinct signatures, whatever the depth of the model.
Run it on an idle machine: other work shows in the collectives.
"""

import argparse
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from planner.capture_cache import load_graph
from profiles import Profile, measure_profile
from profiles.families import BLOCK_TARGET
from profiles.fit import fit_ops
from profiles.op_model import query_of, record_key
from profiles.signatures import signatures

FOLDS = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each of two runs")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("examples/gpt.py"))
    arguments = parser.parse_args()
    graph = load_graph(arguments.model)
    console = Console()
    console.print(count_signatures(graph, arguments.nproc))
    runs = [measure(graph, arguments.nproc, arguments.budget) for _ in range(2)]
    console.print(agreement(*runs))
    for run in runs:
        console.print(left_out(run))
        residuals = [fit.relative_error for fit in run.file.collective_fits]
        console.print(f"collective fits: median residual {np.median(residuals):.1%}")
        for direction, figure in run.file.block_correction.items():
            console.print(f"blocks {direction}: x {figure.value:.2f} ({figure.detail})")


def measure(graph, nproc, budget_s):
    with tempfile.TemporaryDirectory() as folder, Progress() as bar:
        task = bar.add_task("profiling", total=1.0)
        return measure_profile(
            folder,
            nproc=nproc,
            models=[graph],
            budget_s=budget_s,
            progress=lambda fraction, _: bar.update(task, completed=fraction),
        )


def count_signatures(graph, num_devices):
    """Say how many probes a model needs, and a model of sixteen times its blocks."""
    probes = signatures([graph], num_devices=num_devices)
    deep = signatures([replace(graph, blocks=graph.blocks * 16)], num_devices=num_devices)
    distinct = len({probe.key for probe in probes})
    return (
        f"{graph.name}: {len(probes)} probes, {distinct} distinct signatures; "
        f"16 times as deep: {len(deep)} probes"
    )


def agreement(first: Profile, second: Profile) -> Table:
    """Return how many medians of two runs lie within 10% of each other."""
    table = Table("records", "in both", "within 10%", "median difference")
    ops = [
        {(record_key(r), r.arguments): r.seconds for r in profile.ops}
        for profile in (first, second)
    ]
    collectives = [
        {(r.kind, r.num_bytes, r.ranks_per_node): r.seconds for r in profile.collectives}
        for profile in (first, second)
    ]
    for name, (a, b) in (("ops", ops), ("collectives", collectives)):
        off = np.array([abs(a[key] / b[key] - 1) for key in a if key in b])
        if not len(off):
            continue
        table.add_row(name, str(len(off)), f"{(off < 0.1).mean():.0%}", f"{np.median(off):.1%}")
    return table


def left_out(profile: Profile) -> Table:
    """Return errors of predicting each fifth of the op shapes from the other four."""
    records = [r for r in profile.ops if r.target != BLOCK_TARGET]
    shapes = sorted({(r.target, r.shapes, r.arguments) for r in records}, key=str)
    order = np.random.default_rng(0).permutation(len(shapes))
    errors = defaultdict(list)
    for fold in range(FOLDS):
        out = {shapes[index] for index in order[fold::FOLDS]}
        seen = [r for r in records if (r.target, r.shapes, r.arguments) not in out]
        file = profile.file.model_copy(update={"op_fits": fit_ops(seen)})
        model = Profile(file, seen, profile.collectives)
        for record in records:
            if (record.target, record.shapes, record.arguments) in out:
                seconds = model.op_seconds(query_of(record)).seconds
                error = abs(seconds / record.seconds - 1)
                errors[record.target, record.direction].append(error)
    table = Table("target", "direction", "left out", "median error")
    for (target, direction), found in sorted(errors.items()):
        table.add_row(target, direction, str(len(found)), f"{np.median(found):.1%}")
    every = [error for found in errors.values() for error in found]
    table.add_row("all", "", str(len(every)), f"{np.median(every):.1%}")
    return table


if __name__ == "__main__":
    main()
