"""How often an estimate's interval holds what was measured, a source left out at a time.

Published runs of a source are priced as plans of their runtimes. Their interval is that of an
estimate for the runtime (`costmodel.uncertainty`) that knows all other sources and not this: its
width is from their mean errors, of runs of the same kind. Four out of five of the source's runs
should lie in it. Rates are those shipped, which were fitted to many of the sources (`fitted`), so
that of these more lie in it than of runs that nobody has seen. Stalled runs and those with tp over
nodes are left out.

`--of memory` prints the same of memory, by `costmodel.uncertainty.memory_interval` with the errors
that the records have: too few sources print memory to leave one out. `--of odds` prints how many of
the runs ran that are said to fit, and what these say of memory (`odds`). `--write` writes each
runtime's mean errors, of steps and of memory, into its record.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from math import exp, log1p
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED
from benchmarks.published.accuracy import (
    TABLES,
    Case,
    estimated_errors,
    load_cases,
    stalls,
)
from benchmarks.published.configured import as_configured
from benchmarks.published.goldens import GOLDENS, golden_rows
from benchmarks.published.odds import ended_runs, needed_over_live, reliability
from costmodel.execution import execution_names
from costmodel.execution.execution import DATA, RunKind, residuals_of_runs
from costmodel.table.rows.row_files import read_rows
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import price_row, run_of
from costmodel.uncertainty import Z, memory_interval, sigma_of, typical_bytes
from planner.errors import PlannerError
from planner.units import GIB, MIB
from profiles.devices import device_file, device_names

WIDEST_TP = 8

LEAST_ROWS = 3
"""Rows of a source whose mean error says something of the next source's."""

MEMORY_SOURCES = {
    "zb_t4": "measured.csv",
    "zb_t6": "measured.csv",
    "simumax_b200": "measured.csv",
    "torchtitan_202412": "measured.csv",
    "moecp_ao": "moe_cp.csv",
    "ultrascale_playbook": "ultrascale_playbook.csv",
}
"""Sources that print memory and all of what a run does, and their tables; rows that leave out the
microbatch are none of them. Others leave out the sequence's length, recomputation or sharding, or
print what the whole device holds."""

MOST_MEMORY_ROWS = 60
"""Rows of a source whose memory is walked, evenly spaced: a walk takes a tenth of a second."""

Group = tuple[str, str, RunKind]
"""Source, runtime and kind of its runs."""


def kind_of(case: Case) -> RunKind:
    """Return what a run trains."""
    if case.run.sizes.experts is not None:
        return "experts"
    return "adapters" if case.run.lora_rank else "dense"


def priced_groups(folder: Path, every: int = 1) -> dict[Group, np.ndarray]:
    """Return relative errors of estimates by source, runtime and kind; of one row of so many."""
    found: dict[Group, list[float]] = defaultdict(list)
    for _, name, experts in TABLES:
        cases, _ = load_cases(folder / name, experts=experts, every=every)
        kept, errors = estimated_errors([case for case in cases if case.ran])
        stalled = stalls(kept, errors)
        for case, error, stops in zip(kept, errors, stalled, strict=True):
            if not stops and case.run.tp <= WIDEST_TP:
                found[case.source, case.run.stack.name, kind_of(case)].append(float(error))
    return {group: np.array(errors) for group, errors in found.items()}


def fitted_sources() -> set[str]:
    """Return the sources that some device's rates were fitted to."""
    shipped = [device_file(name).shipped for name in device_names()]
    return {
        source
        for device in shipped
        if device is not None and device.training is not None
        for source in device.training.residuals
    }


def table(groups: dict[Group, np.ndarray]) -> list[dict[str, str | int | float | bool]]:
    """Return a line for each source, runtime and kind."""
    fitted = fitted_sources()
    lines: list[dict[str, str | int | float | bool]] = []
    for (source, runtime, kind), errors in sorted(groups.items()):
        sigma = sigma_of(residuals_of_runs(runtime, kind, leave_out={source}))
        held = [abs(log1p(error)) <= Z * sigma for error in errors]
        lines.append(
            {
                "source": source,
                "runtime": runtime,
                "kind": kind,
                "fitted": source in fitted and kind == "dense",
                "rows": len(errors),
                "error_pct": 100 * float(np.abs(errors).mean()),
                "interval_pct": 100 * (exp(Z * sigma) - 1),
                "coverage_pct": 100 * float(np.mean(held)),
            }
        )
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """A run whose memory is published, beside its estimate."""

    source: str
    """Where it is published."""
    runtime: str
    """Name of the record it is priced with."""
    error: float
    """Relative: of live tensors where the source prints these, else of what is typically held."""
    holds: bool
    """Whether the measured bytes lie in the interval; of live tensors with the allocator's share
    as estimated on both sides."""


def memory_runs(folder: Path) -> list[MemoryRun]:
    """Return the runs that print their memory, each beside its estimate."""
    prices, found = RowPrices(), []
    for source, name in MEMORY_SOURCES.items():
        rows = [
            row
            for row in map(as_configured, read_rows(folder / name))
            if row["source_id"] == source and row["peak_mem_gib"] and row["micro_batch"]
        ]
        for row in rows[:: -(-len(rows) // MOST_MEMORY_ROWS)]:
            try:
                run, profile, rates = run_of(row)
                memory = prices.estimate(run, profile, rates).memory
            except PlannerError:
                continue
            fullest = max(memory, key=lambda parts: float(parts.total))
            tensors = float(fullest.tensor_bytes)
            held = tensors + float(fullest.allocator_bytes)
            measured = float(row["peak_mem_gib"]) * GIB
            if "max allocated" in row["notes"].lower():
                measured *= held / tensors
            interval = memory_interval(fullest, profile, run.stack)
            context = float(fullest.context_bytes)
            found.append(
                MemoryRun(
                    source=source,
                    runtime=run.stack.name,
                    error=typical_bytes(fullest, profile, run.stack) / measured - 1,
                    holds=interval.holds(measured + context),
                )
            )
    return found + golden_runs(folder / f"{GOLDENS}.csv")


def golden_runs(path: Path) -> list[MemoryRun]:
    """Return Megatron-LM's regression runs whose flags are priced and whose number of devices is
    known, each beside the estimate of the rank that prints its memory: the last, of the last stage
    (megatron/training/global_vars.py, _set_tensorboard_writer).
    """
    prices, found = RowPrices(), []
    for line, row in golden_rows(path):
        if not line["mem_max_mib"]:
            continue
        try:
            priced = price_row(row, prices)
        except PlannerError:
            continue
        last = priced.estimate.memory[-1]
        tensors, measured = float(last.tensor_bytes), float(line["mem_max_mib"]) * MIB
        around = memory_interval(last, priced.profile, priced.run.stack)
        # Of live tensors alone: the allocator and the context are as estimated on both sides.
        added = float(last.allocator_bytes) / tensors * measured + float(last.context_bytes)
        found.append(
            MemoryRun(
                source=GOLDENS,
                runtime=priced.run.stack.name,
                error=tensors / measured - 1,
                holds=around.holds(measured + added),
            )
        )
    return found


def memory_table(runs: list[MemoryRun]) -> list[dict[str, str | float]]:
    """Return how far memory is off, and how often its interval holds it, by source and runtime."""
    groups: dict[tuple[str, str], list[MemoryRun]] = defaultdict(list)
    for run in runs:
        groups[run.source, run.runtime].append(run)
    return [
        {
            "source": source,
            "runtime": runtime,
            "rows": len(mine),
            "error_pct": 100 * float(np.mean([abs(run.error) for run in mine])),
            "median_pct": 100 * float(np.median([abs(run.error) for run in mine])),
            "nine_of_ten_pct": 100 * float(np.quantile([abs(run.error) for run in mine], 0.9)),
            "bias_pct": 100 * float(np.mean([run.error for run in mine])),
            "held_pct": 100 * float(np.mean([run.holds for run in mine])),
        }
        for (source, runtime), mine in groups.items()
    ]


def write_residuals(groups: dict[Group, np.ndarray], runs: list[MemoryRun]) -> None:
    """Write the mean errors of each runtime, of steps and of memory, into its record.

    Ours has none of memory: dry runs tell it.
    """
    for name in execution_names():
        steps: dict[str, dict[str, float]] = {}
        for (source, runtime, kind), errors in sorted(groups.items()):
            if runtime == name and len(errors) >= LEAST_ROWS:
                steps.setdefault(kind, {})[source] = round(float(np.abs(errors).mean()), 4)
        memory: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            if run.runtime == name:
                memory[run.source].append(abs(run.error))
        path = DATA / f"{name}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        if memory:
            record["memory_residuals"] = {
                source: round(float(np.mean(errors)), 4)
                for source, errors in sorted(memory.items())
            }
        record["residuals"] = steps
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@benchmark("intervals", quick={"every": 60})
def intervals(
    *,
    folder: Path = PUBLISHED,
    of: Annotated[Literal["steps", "memory", "odds"], "what is held"] = "steps",
    every: Annotated[int, "price one row of so many (steps and odds)"] = 1,
    write: Annotated[bool, "write mean errors into records"] = False,
) -> Result:
    if of == "odds":
        ended = ended_runs(folder, every)
        factor, sigma = needed_over_live(ended)
        told = f"reserved_factor {factor:.3f}, reserved_sigma {sigma:.3f}"
        return Result(reliability(ended), [told])
    runs = memory_runs(folder) if of == "memory" or write else []
    if of == "memory":
        held = 100 * np.mean([run.holds for run in runs])
        return Result(memory_table(runs), [f"all: {held:.0f}% of {len(runs)} runs"])
    groups = priced_groups(folder, every)
    if write:
        write_residuals(groups, runs)
    lines = table(groups)
    notes = []
    for name, chosen in (
        ("all", lines),
        ("fitted", [line for line in lines if line["fitted"]]),
        ("others", [line for line in lines if not line["fitted"]]),
    ):
        held = np.array([float(line["coverage_pct"]) for line in chosen])
        rows = np.array([int(line["rows"]) for line in chosen])
        notes.append(
            f"{name}: {held.mean():.0f}% of a source, {held @ rows / rows.sum():.0f}% of rows"
        )
    return Result(lines, notes)
