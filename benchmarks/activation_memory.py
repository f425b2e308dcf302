"""Activation memory of 1F1B against FThenB over a grid of pp and microbatches.

    python benchmarks/activation_memory.py [--pp 2 4] [--microbatches 4 8 16] [--json [rows.json]]

Measured: the real engine on fake tensors (`planner.runtime.proofs.dryrun`), every pp rank: the
bytes alive after each forward, without weights, gradients, optimizer state and batch; what is left
are saved tensors and posted receive buffers. Predicted: the memory model's activations and buffers.
Both on the pp rank that has most, of a small GPT; needs neither ranks nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.layers import LayerChain
from costmodel import CostCache, estimate
from planner.capture import capture_module
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.wiring import stage_params
from planner.language.plan import Plan
from planner.runtime.proofs.dryrun import DryRun, dry_run
from profiles import load_profile

SCHEDULES = ("fthenb", "1f1b")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Peak activation bytes of both schedules, and how much less 1F1B needs."""

    pp: int
    num_microbatches: int
    fthenb_measured_bytes: int
    fthenb_predicted_bytes: float
    one_f_one_b_measured_bytes: int
    one_f_one_b_predicted_bytes: float

    @property
    def measured_saving(self) -> float:
        """The part of FThenB's bytes that 1F1B does without."""
        return 1 - self.one_f_one_b_measured_bytes / self.fthenb_measured_bytes

    @property
    def predicted_saving(self) -> float:
        """The same, predicted."""
        return 1 - self.one_f_one_b_predicted_bytes / self.fthenb_predicted_bytes

    @property
    def largest_error(self) -> float:
        """The larger relative error of the two predictions."""
        return max(
            abs(self.fthenb_predicted_bytes / self.fthenb_measured_bytes - 1),
            abs(self.one_f_one_b_predicted_bytes / self.one_f_one_b_measured_bytes - 1),
        )


def measured_bytes(plan: Plan, graph: ModelGraph, build: Callable[[], nn.Module]) -> int:
    """Return the most bytes of activations and receive buffers that a pp rank holds."""
    return max(_held(plan, graph, dry_run(plan, graph, build, rank=r)) for r in range(plan.pp))


def _held(plan: Plan, graph: ModelGraph, run: DryRun) -> int:
    # A step begins without gradients, and the first backward makes all of the rank's.
    gradients = sum(
        graph.tensor[name].bytes_at(1)
        for name in stage_params(graph, plan)[run.pp_rank]
        if graph.tensor[name].requires_grad
    )
    held, made = [], 0
    for moment in run.samples:
        if moment.kind == "B":
            made = gradients
        elif moment.kind == "F":
            held.append(moment.end_bytes - (run.rest_bytes - gradients) - made)
    return max(held)


def grid(
    graph: ModelGraph,
    build: Callable[[], nn.Module],
    sizes: Iterable[tuple[int, int]],
    *,
    microbatch_size: int = 4,
) -> list[Row]:
    """Return a row for each (pp, num_microbatches)."""
    costs = CostCache(graph, CpuProfile())
    rows = []
    for pp, num_microbatches in sizes:
        found: dict[str, tuple[int, float]] = {}
        for schedule in SCHEDULES:
            plan = default_plan(
                graph,
                pp=pp,
                num_microbatches=num_microbatches,
                microbatch_size=microbatch_size,
                schedule=schedule,
            )
            memory = estimate(graph, costs.profile, plan, costs=costs).memory
            predicted = max(float(m.activation_bytes + m.communication_bytes) for m in memory)
            found[schedule] = measured_bytes(plan, graph, build), predicted
        rows.append(
            Row(
                pp=pp,
                num_microbatches=num_microbatches,
                fthenb_measured_bytes=found["fthenb"][0],
                fthenb_predicted_bytes=found["fthenb"][1],
                one_f_one_b_measured_bytes=found["1f1b"][0],
                one_f_one_b_predicted_bytes=found["1f1b"][1],
            )
        )
    return rows


class CpuProfile:
    """A shipped profile that says its devices are CPUs, whose kernels a dry run imitates."""

    def __init__(self) -> None:
        self._profile = load_profile("h100-sxm5-80gb")
        self.cluster = replace(self._profile.cluster, device_type="cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)


def build_model() -> LayerChain:
    """Return the benchmark's model."""
    return LayerChain(8, hidden=32, heads=2)


def model_graph() -> ModelGraph:
    """Return the capture of the benchmark's model."""
    two, three = (dict.fromkeys(("x", "target"), torch.randn(n, 16, 32)) for n in (2, 3))
    return capture_module(build_model(), two, three)


def main() -> None:
    """Print the grid, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--json", nargs="?", const="-", help="print rows, or write them here")
    options = parser.parse_args()
    sizes = [(pp, m) for pp in options.pp for m in options.microbatches if m >= pp]
    rows = grid(model_graph(), build_model, sizes)
    if options.json:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        print(text) if options.json == "-" else Path(options.json).write_text(text)
        return
    print("KiB of activations       fthenb: measured predicted  1f1b: measured predicted")
    for row in rows:
        kib = [
            bytes_ / 1024
            for bytes_ in (
                row.fthenb_measured_bytes,
                row.fthenb_predicted_bytes,
                row.one_f_one_b_measured_bytes,
                row.one_f_one_b_predicted_bytes,
            )
        ]
        print(
            f"pp {row.pp} microbatches {row.num_microbatches:3}        {kib[0]:9.0f} {kib[1]:9.0f}"
            f"       {kib[2]:9.0f} {kib[3]:9.0f}   1f1b saves {row.measured_saving:.1%}, "
            f"predicted {row.predicted_saving:.1%}; largest error {row.largest_error:.2%}"
        )


if __name__ == "__main__":
    main()
