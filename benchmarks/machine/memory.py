"""The memory model against its referees, over models and layouts: every rank's peak bytes.

For each model and layout, and for each rank: what `estimate` predicts, and what the real
engine holds on fake tensors (`dryrun`); with `--real`, also what it holds when
two gloo ranks run for real and count the bytes of live tensors. Tensors only: what an
allocator rounds up, and the framework's context, are in none of them. Prints the errors of
each layout, worst first, and the bound that the memory model states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks.harness import Result, benchmark, note, on_ranks
from costmodel import CostCache, estimate
from planner.capture import capture_source
from planner.capture.source.model_file import ModelSource
from planner.errors import PlannerError
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.dryrun import dry_run, track_run
from profiles import Profile
from tests.builders import tiny_models
from tests.cpu_profile import CpuProfile

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "full-but-last": {"recompute": "full", "recompute_last": False},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "pp2-uneven": {"pp": 2, "balance": "uneven"},
    "pp2-fthenb-full": {"pp": 2, "schedule": "fthenb", "recompute": "full"},
    "pp2-selective": {"pp": 2, "recompute": "selective"},
    "pp2-vpp2": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "pp2-fold": {"pp": 2, "vpp": 2, "schedule": "fold_all_in_all_out"},
    "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"},
    "pp2-zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "pp2-zb_h1-selective": {"pp": 2, "schedule": "zb_h1", "recompute": "selective"},
    "pp2-dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"},
    "dp2-zero1": {"dp": 2, "zero_stage": 1},
    "dp2-zero2": {"dp": 2, "zero_stage": 2},
    "dp2-zero3": {"dp": 2, "zero_stage": 3},
    "dp2-zero3-full": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "dp2-zero3-selective": {"dp": 2, "zero_stage": 3, "recompute": "selective"},
    "tp2-full": {"tp": 2, "recompute": "full"},
    "tp2-selective": {"tp": 2, "recompute": "selective"},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2-tp2-zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "dp2-tp2-zero3": {"dp": 2, "tp": 2, "zero_stage": 3},
    "dp2-pp2-zero2": {"dp": 2, "pp": 2, "zero_stage": 2},
    "dp2-pp2-zero3": {"dp": 2, "pp": 2, "zero_stage": 3},
    "cp2-zero3": {"cp": 2, "zero_stage": 3},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-pp2": {"cp": 2, "pp": 2},
    "tp2-then-dp2": {"tp": 2, "pp": 2, "by_stage": {"tp": (2, 1)}},
    "dp2-then-tp2": {"tp": 2, "pp": 2, "by_stage": {"tp": (1, 2)}},
    "dp2-then-tp2-zero3": {"dp": 2, "pp": 2, "by_stage": {"tp": (1, 2)}, "zero_stage": 3},
    "bf16": {"precision": "bf16"},
    "bf16-tp2": {"precision": "bf16", "tp": 2},
    "bf16-pp2": {"precision": "bf16", "pp": 2},
    "bf16-dp2-zero1": {"precision": "bf16", "dp": 2, "zero_stage": 1},
    "bf16-dp2-zero3": {"precision": "bf16", "dp": 2, "zero_stage": 3},
}
"""Arguments of `default_plan`, but for `recompute_last` and `precision`; "uneven" balance gives
the first stage all blocks but one."""

MICROBATCH_SIZE = 4
"""Samples of a microbatch, over all replicas of one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Peak bytes of one rank. `real_bytes` is None where no real ranks ran."""

    model: str
    layout: str
    rank: int
    predicted_bytes: float
    dry_run_bytes: int
    real_bytes: int | None = None

    @property
    def error(self) -> float:
        """How far the prediction is over the dry run, as a part of it."""
        return self.predicted_bytes / self.dry_run_bytes - 1

    @property
    def real_error(self) -> float | None:
        """How far the prediction is over the real run, as a part of it."""
        return None if self.real_bytes is None else self.predicted_bytes / self.real_bytes - 1


def source_of(name: str) -> ModelSource:
    """Return a tiny model as a model file would give it."""
    tiny = tiny_models()[name]
    return ModelSource(
        path=Path(f"{name}.py"), build=tiny.build, batch=tiny.batch, loss=tiny.loss, dependencies=()
    )


def make_plan(
    graph: ModelGraph,
    *,
    microbatch_size: int = MICROBATCH_SIZE,
    precision: str = "model",
    recompute_last: bool = True,
    balance: str = "",
    **layout: Any,
) -> Plan:
    """Return the plan of a layout. Raises PlannerError where the model has no such plan."""
    if balance == "uneven":
        layout["balance"] = (len(graph.blocks) - 1, 1)
    plan = default_plan(
        graph,
        microbatch_size=microbatch_size,
        **{"num_microbatches": 2 * layout.get("pp", 1), **layout},
    )
    stages = tuple(
        stage.model_copy(update={"recompute_last": recompute_last}) for stage in plan.stages
    )
    return plan.model_copy(update={"precision": precision, "stages": stages})


def rows_of(
    name: str,
    layouts: Iterable[str],
    *,
    microbatch_size: int = MICROBATCH_SIZE,
    every_rank: bool = True,
) -> Iterator[Row]:
    """Yield a row for each rank of each layout that the model has, or for each pp rank."""
    source = source_of(name)
    graphs: dict[str, tuple[ModelGraph, CostCache]] = {}
    for label in layouts:
        layout = LAYOUTS[label]
        precision = layout.get("precision", "model")
        if precision not in graphs:
            graph = capture_source(source, precision=precision)
            profile: Profile = CpuProfile()  # type: ignore[assignment]
            graphs[precision] = graph, CostCache(graph, profile)
        graph, costs = graphs[precision]
        try:
            plan = make_plan(graph, microbatch_size=microbatch_size, **layout)
        except PlannerError as error:
            note(f"{name} has no {label}: {error}")
            continue
        memory = estimate(graph, costs.profile, plan, costs=costs).memory
        step = 1 if every_rank else plan.world_size // plan.pp
        for rank in range(0, plan.world_size, step):
            run = dry_run(plan, graph, source.build, rank=rank, on_gloo=True)
            yield Row(
                model=name,
                layout=label,
                rank=rank,
                predicted_bytes=float(memory[run.pp_rank].tensor_bytes),
                dry_run_bytes=run.peak_bytes,
            )


def real_bytes(name: str, captured: Mapping[str, str], layouts: list[str]) -> dict[str, int]:
    """On each of some real ranks: the peak bytes of each layout, by label."""
    found = {}
    for label in layouts:
        layout = LAYOUTS[label]
        graph = from_json(captured[layout.get("precision", "model")])
        plan = make_plan(graph, **layout)
        source, mesh = source_of(name), build_mesh(plan, torch.device("cpu"))
        run = track_run(plan, graph, source.build, mesh, source.batch)
        mesh.close()
        found[label] = run.peak_bytes
    return found


def with_real_runs(name: str, rows: list[Row]) -> list[Row]:
    """Return rows of one model with what their ranks hold in real runs, where two take part."""
    sizes = Counter(row.layout for row in rows)
    labels = [label for label in dict.fromkeys(row.layout for row in rows) if sizes[label] == 2]
    captured = {
        precision: to_json(capture_source(source_of(name), precision=precision))
        for precision in {LAYOUTS[label].get("precision", "model") for label in labels}
    }
    held = on_ranks(2, real_bytes, name, captured, labels)
    return [
        replace(row, real_bytes=held[row.rank][row.layout]) if row.layout in labels else row
        for row in rows
    ]


@benchmark("memory", quick={"models": ("gpt",), "layouts": ("pp2",), "real": True})
def memory(
    *,
    models: tuple[str, ...] = tuple(tiny_models()),
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    microbatch_size: int = MICROBATCH_SIZE,
    first_ranks: Annotated[bool, "one rank of each pp rank"] = False,
    real: Annotated[bool, "also run layouts of two ranks"] = False,
) -> Result:
    found: list[Row] = []
    for name in models:
        rows = list(
            rows_of(name, layouts, microbatch_size=microbatch_size, every_rank=not first_ranks)
        )
        found += with_real_runs(name, rows) if real else rows
        note(f"{name}: {len(rows)} ranks")
    found.sort(key=lambda row: -abs(row.error))
    errors = [abs(row.error) for row in found]
    within = sum(error <= 0.01 for error in errors) / len(errors)
    return Result(
        [asdict(row) | {"error": row.error, "real_error": row.real_error} for row in found],
        [
            f"{len(found)} ranks: largest error {max(errors):.2%}, furthest under "
            f"{min(row.error for row in found):.2%}, within 1%: {within:.1%}"
        ],
    )
