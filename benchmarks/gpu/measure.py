"""Measure a GPU machine and set the numbers beside those of its shipped profile.

    python -m benchmarks.gpu.measure [--budget SECONDS] [--out DIR] [--keep]

Measures the standard grid on every GPU of this machine (bf16, fp16 and fp32, forward and
backward, in CUDA graphs), collectives among them, memory, optimizer and overlap, and prints
how far the shipped profile of this GPU is off, by family. `--keep` writes the measured
compute fits to benchmarks/gpu/NAME.json, which `python -m benchmarks.fit_published` then
ships instead of the fitted ones.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from profiles import Profile, load_profile, measure_profile
from profiles.catalog import shipped_for_gpu
from profiles.families import family_of
from profiles.op_model import query_of
from profiles.records import OpFit

HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-profile"))
    parser.add_argument("--keep", action="store_true", help="ship the measured compute fits")
    arguments = parser.parse_args()
    measured = measure(arguments.out, arguments.budget)
    if measured is None:  # a serving rank of a multi-node run
        return
    shipped = shipped_for_gpu(measured.cluster.device)
    if shipped is None:
        print(f"no shipped profile is of {measured.cluster.device}; {arguments.out} stands alone")
        return
    Console().print(comparison(load_profile(shipped), measured))
    if arguments.keep:
        path = HERE / f"{shipped}.json"
        path.write_text(json.dumps(kept_fits(measured), indent=1) + "\n")
        print(f"wrote {path}; now run python -m benchmarks.fit_published TABLES")


def measure(out, budget_s):
    """Return the profile of all GPUs of this machine."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; this script measures GPUs (CPU: planner profile)")
    with Progress() as bar:
        task = bar.add_task("profiling", total=1.0)
        return measure_profile(
            out,
            nproc=torch.cuda.device_count(),
            device="cuda",
            budget_s=budget_s,
            progress=lambda fraction, doing: bar.update(
                task, completed=fraction, description=doing[:60]
            ),
        )


def errors_by_family(shipped: Profile, measured: Profile) -> dict[tuple, list[float]]:
    """Return signed relative errors of the shipped profile on each measured op."""
    errors = defaultdict(list)
    for record in measured.ops:
        predicted = shipped.op_seconds(query_of(record)).seconds
        key = family_of(record.target), record.dtype, record.direction
        errors[key].append(predicted / record.seconds - 1)
    return dict(errors)


def comparison(shipped: Profile, measured: Profile) -> Table:
    """Return a table of the shipped profile's errors."""
    table = Table("family", "dtype", "direction", "records", "median error", "median |error|")
    for key, errors in sorted(errors_by_family(shipped, measured).items()):
        median, size = np.median(errors), np.median(np.abs(errors))
        table.add_row(*key, str(len(errors)), f"{median:+.1%}", f"{size:.1%}")
    return table


def kept_fits(measured: Profile) -> list[dict]:
    """Return the measured fits of op families as JSON, with where and when in the detail."""
    when = max(record.measured_at for record in measured.ops)[:10]
    where = f"measured on {measured.cluster.device}, {when}"
    return [
        fit.model_copy(update={"detail": f"{where}: {fit.detail}"}).model_dump(mode="json")
        for fit in measured.file.op_fits
        if "." not in fit.family
    ]


def read_kept(name: str) -> list[OpFit]:
    """Return the fits that were kept for a shipped profile; none if nobody measured it."""
    path = HERE / f"{name}.json"
    if not path.exists():
        return []
    return [OpFit.model_validate(fit) for fit in json.loads(path.read_text())]


if __name__ == "__main__":
    main()
