"""Activation memory of 1F1B against FThenB over a grid of pp and microbatches.

Measured: the real engine on fake tensors (`planner.runtime.proofs.dryrun`), every pp rank: the
bytes alive after each forward, without weights, gradients, optimizer state and batch; what is left
are saved tensors and posted receive buffers. Predicted: the memory model's activations and buffers.
Both on the pp rank that has most, of a small GPT; needs neither ranks nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from benchmarks.harness import Result, benchmark
from benchmarks.runtime.layers import LayerChain
from costmodel import CostCache, estimate
from planner.capture import capture_module
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.wiring import stage_params
from planner.language.plan import Plan
from planner.runtime.proofs.dryrun import DryRun, dry_run
from tests.cpu_profile import CpuProfile

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


def build_model() -> LayerChain:
    """Return the benchmark's model."""
    return LayerChain(8, hidden=32, heads=2)


def model_graph() -> ModelGraph:
    """Return the capture of the benchmark's model."""
    two, three = (dict.fromkeys(("x", "target"), torch.randn(n, 16, 32)) for n in (2, 3))
    return capture_module(build_model(), two, three)


@benchmark("activation_memory", quick={"pp": (2,), "microbatches": (4,)})
def activation_memory(
    *, pp: tuple[int, ...] = (2, 4), microbatches: tuple[int, ...] = (4, 8, 16)
) -> Result:
    sizes = [(ranks, m) for ranks in pp for m in microbatches if m >= ranks]
    return Result(
        [
            {
                **asdict(row),
                "measured_saving": row.measured_saving,
                "predicted_saving": row.predicted_saving,
                "largest_error": row.largest_error,
            }
            for row in grid(model_graph(), build_model, sizes)
        ]
    )
