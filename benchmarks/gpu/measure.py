"""Measure a GPU machine and set the numbers beside those of its shipped profile.

    python -m benchmarks.gpu.measure [--budget SECONDS] [--out DIR] [--keep] [--device cpu]

Measures on every GPU of this machine: the standard grid (bf16, fp16 and fp32, 8-bit where
there is one; forward and backward, in CUDA graphs, cold and warm), whole layers in bf16
(eager and compiled), the optimizer's step and its casts and sums, copies to and from the
host, the context's memory and the allocator's overhead, the time to issue an op; and, with
several GPUs, collectives and their overlap with compute. Prints how far the shipped profile
of this GPU is off, by family. `--keep` writes the compute part to benchmarks/gpu/NAME.json,
which `python -m benchmarks.fit_published` then ships in place of what it fitted and assumed.
`--device cpu` goes the same way on a CPU, with a small model, to try it out.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.gpu.kept import keep, write_kept
from planner.capture.source.capture_cache import load_graph
from profiles import Profile, measure_profile
from profiles.devices import profile_for_gpu, shipped_for_gpu
from profiles.lookup.families import BLOCK, family_of
from profiles.lookup.op_model import query_of

MODELS = {
    "cuda": Path(__file__).with_name("layer.py"),
    "cpu": Path(__file__).parents[2] / "examples" / "gpt.py",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-profile"))
    parser.add_argument("--keep", action="store_true", help="ship the measured compute part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    measured = measure(arguments.out, arguments.budget, device=arguments.device)
    if measured is None:  # a serving rank of a multi-node run
        return
    described = profile_for_gpu(measured.cluster.device)
    if described is None:
        print(f"no shipped profile is of {measured.cluster.device}; {arguments.out} stands alone")
        return
    Console().print(comparison(Profile(described), measured))
    if arguments.keep:
        shipped = shipped_for_gpu(measured.cluster.device)
        if shipped is None:
            sys.exit(
                f"{measured.cluster.device} has a data sheet only, so nothing is shipped of it"
            )
        path = write_kept(shipped, keep(measured))
        print(f"wrote {path}; now run python -m benchmarks.fit_published TABLES")


def measure(out, budget_s, *, device="cuda", model=None, grid=True, compiled=True, command=""):
    """Return the profile of all GPUs of this machine, or of one process on its CPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; this script measures GPUs (try it with --device cpu)")
    with Progress() as bar:
        task = bar.add_task("profiling", total=1.0)
        return measure_profile(
            out,
            nproc=torch.cuda.device_count() if device == "cuda" else 1,
            device=device,
            models=[load_graph(model or MODELS[device], precision="bf16")],
            grid=grid,
            compiled=compiled,
            budget_s=budget_s,
            command=command or " ".join(["python -m benchmarks.gpu.measure", *sys.argv[1:]]),
            progress=lambda fraction, doing: bar.update(
                task, completed=fraction, description=doing[:60]
            ),
        )


def errors_by_family(shipped: Profile, measured: Profile) -> dict[tuple, list[float]]:
    """Return signed relative errors of the shipped profile on each measured op."""
    errors = defaultdict(list)
    for record in measured.ops:
        family = family_of(record.target)
        if family == BLOCK:
            continue
        predicted = shipped.op_seconds(query_of(record)).seconds
        errors[family, record.dtype, record.direction].append(predicted / record.seconds - 1)
    return dict(errors)


def comparison(shipped: Profile, measured: Profile) -> Table:
    """Return a table of the shipped profile's errors."""
    table = Table("family", "dtype", "direction", "records", "median error", "median |error|")
    for key, errors in sorted(errors_by_family(shipped, measured).items()):
        median, size = np.median(errors), np.median(np.abs(errors))
        table.add_row(*key, str(len(errors)), f"{median:+.1%}", f"{size:.1%}")
    return table


if __name__ == "__main__":
    main()
