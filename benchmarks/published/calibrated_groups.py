"""What a few runs of a cluster and a stack tell of the next: published groups, a run left out.

A group are runs of one source, device and runtime. Of each a few rows are priced, once, with what
their step grows by with each kind of work (`costmodel.runtime_calibration`). Then each in turn is
the next run: it is predicted with factors learned from `known` others. Printed are mean errors,
half widths of intervals and how many of the measured steps lie in them, before and after; both
know the errors of all other sources and not of this.

`within_pct` is one sigma of the runs' logarithmic errors about their group's mean, `between_pct`
that mean; of all groups together their ratio is `costmodel.uncertainty.WITHIN_SOURCE`. `--prices`
names a file of prices: what it has is not priced again, what it lacks is added.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness import Result, benchmark, note
from benchmarks.published import PUBLISHED
from benchmarks.published.accuracy import TABLES, Case, load_cases
from benchmarks.published.intervals import WIDEST_TP, kind_of
from costmodel.estimate import step_seconds
from costmodel.execution.execution import RunKind, residuals_of_runs
from costmodel.runtime_calibration import STEP, drift_of, growth, priors_of
from costmodel.table.rows.row_plan import RowPrices
from costmodel.uncertainty import Z, sigma_of
from planner.errors import PlannerError
from profiles.calibration import calibrate, next_sigma
from profiles.records import CalibrationRun, Observation

LEAST_ROWS = 3
"""Runs of a group: one is left out, two are known."""

STALLING = ("ultrascale_playbook",)
"""Tables of which a part of the runs stalled (`accuracy.stalls`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A published run with its price."""

    table: str
    """The file and the group it is in."""
    row: int
    """Which of the group's runs."""
    source: str
    """Where it was published."""
    gpu: str
    """Its device, as published."""
    runtime: str
    """The record it is priced for."""
    kind: RunKind
    """What it trains."""
    measured_s: float
    """Its step, published."""
    predicted_s: float
    """Its step, priced."""
    grown_s: dict[str, float]
    """By how much that grows when a factor grows by 1, by kind of work."""

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Source, device, runtime and kind."""
        return self.source, self.gpu, self.runtime, self.kind

    def as_known(self, leave_out: set[str]) -> CalibrationRun:
        """Return what a regression takes of it."""
        step = Observation(
            what=STEP,
            measured_s=self.measured_s,
            standard_error=0.0,
            predicted_s=self.predicted_s,
            parts_s={
                term: seconds
                for term, seconds in self.grown_s.items()
                if seconds > 1e-6 * self.predicted_s
            },
        )
        return CalibrationRun(
            plan="",
            model=self.source,
            num_steps=1,
            recording=f"{self.table} {self.row}",
            observations=(step,),
            drift=drift_of(self.runtime, self.kind, leave_out=leave_out),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A run left out: relative error, and one sigma of it, before and after."""

    error: float
    """Of the price."""
    sigma: float
    """One sigma of it."""
    corrected_error: float
    """Of the price with factors."""
    corrected_sigma: float
    """One sigma of that."""


def chosen_cases(
    folder: Path, most: int, sources: Collection[str]
) -> Iterator[tuple[str, int, Case]]:
    """Yield so many runs of each group, evenly spaced, with the group's name and their place in
    it.
    """
    for _, name, experts in TABLES:
        if name.removesuffix(".csv") in STALLING:
            continue
        cases, _ = load_cases(folder / name, experts=experts, sources=sources)
        groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
        for case in cases:
            if case.ran and case.run.tp <= WIDEST_TP:
                group = case.source, case.group[2], case.run.stack.name, kind_of(case)
                groups[group].append(case)
        for group, found in groups.items():
            if len(found) >= LEAST_ROWS:
                places = np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int)
                for place in dict.fromkeys(places.tolist()):
                    yield f"{name}: {', '.join(group)}", place, found[place]


def priced(folder: Path, most: int, sources: Collection[str], kept: Path | None) -> list[PricedRun]:
    """Return runs of all groups, or of some sources', priced now or in the file."""
    known: dict[tuple[str, int], PricedRun] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            run = PricedRun(**json.loads(line))
            known[run.table, run.row] = run
    prices, found = RowPrices(), []
    for table, row, case in chosen_cases(folder, most, sources):
        if (table, row) not in known:
            try:
                plan, costs = prices.plan(case.run, case.profile, case.rates)
                known[table, row] = PricedRun(
                    table=table,
                    row=row,
                    source=case.source,
                    gpu=case.group[2],
                    runtime=case.run.stack.name,
                    kind=kind_of(case),
                    measured_s=case.step_s,
                    predicted_s=step_seconds(plan, costs),
                    grown_s=growth(plan, costs),
                )
            except PlannerError as error:
                note(f"not a plan: {case.source}: {error}")
                continue
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[table, row])) + "\n")
        found.append(known[table, row])
    return found


def left_out(runs: Sequence[PricedRun], known: int) -> list[Told]:
    """Return each run of a group as the next of so many others, those that follow it in turn."""
    told = []
    for index, run in enumerate(runs):
        others = [runs[(index + step) % len(runs)] for step in range(1, len(runs))][:known]
        out = {run.source}
        learned = [other.as_known(out) for other in others]
        priors = priors_of(run.runtime, learned, leave_out=out)
        factors = {t: factor.value for t, factor in calibrate(learned, priors).factors.items()}
        more_s = sum(run.grown_s[term] * (value - 1.0) for term, value in factors.items())
        corrected_s = run.predicted_s + more_s
        shares = {t: run.grown_s[t] * factors.get(t, 1.0) / corrected_s for t in run.grown_s}
        told.append(
            Told(
                error=run.predicted_s / run.measured_s - 1,
                sigma=sigma_of(residuals_of_runs(run.runtime, run.kind, leave_out=out)),
                corrected_error=corrected_s / run.measured_s - 1,
                corrected_sigma=next_sigma(
                    learned,
                    shares,
                    drift=drift_of(run.runtime, run.kind, leave_out=out),
                    priors=priors,
                ),
            )
        )
    return told


def figures(told: Sequence[Told]) -> dict[str, float]:
    """Return mean errors, half widths and coverage of runs, before and after."""
    found: dict[str, float] = {}
    for when, errors, sigmas in (
        ("before", [t.error for t in told], [t.sigma for t in told]),
        ("after", [t.corrected_error for t in told], [t.corrected_sigma for t in told]),
    ):
        held = [abs(log(1 + e)) <= Z * sigma for e, sigma in zip(errors, sigmas, strict=True)]
        found |= {
            f"error_{when}_pct": 100 * float(np.mean(np.abs(errors))),
            f"interval_{when}_pct": 100 * float(np.mean([exp(Z * s) - 1 for s in sigmas])),
            f"held_{when}_pct": 100 * float(np.mean(held)),
        }
    return found


@benchmark("calibrated_groups", quick={"most": 3, "sources": ("mlm_llama_readme",)})
def calibrated_groups(
    *,
    folder: Path = PUBLISHED,
    known: Annotated[int, "runs that are known of a group"] = 3,
    most: Annotated[int, "runs of a group that are priced"] = 4,
    sources: Annotated[tuple[str, ...], "of these sources alone"] = (),
    prices: Annotated[Path | None, "a file of prices, read and added to"] = None,
) -> Result:
    groups: dict[tuple, list[PricedRun]] = defaultdict(list)
    for run in priced(folder, most, sources, prices):
        groups[run.group].append(run)
    lines, everyone, within, between = [], [], [], []
    for (source, gpu, runtime, kind), runs in sorted(groups.items()):
        if len(runs) < LEAST_ROWS:
            continue
        told = left_out(runs, known)
        everyone += told
        off = np.array([log(run.predicted_s / run.measured_s) for run in runs])
        within.append(float(off.var(ddof=1)))
        between.append(float(off.mean() ** 2 - off.var(ddof=1) / len(off)))
        lines.append(
            {"source": source, "gpu": gpu, "runtime": runtime, "kind": kind, "rows": len(runs),
             **figures(told), "within_pct": 100 * within[-1] ** 0.5,
             "between_pct": 100 * float(abs(off.mean()))}
        )  # fmt: skip
    if not lines:
        raise PlannerError(f"no group of {LEAST_ROWS} runs in {folder}; give other sources")
    lines.append(
        {"source": "ALL", "gpu": "", "runtime": "", "kind": "", "rows": len(everyone),
         **figures(everyone), "within_pct": 100 * float(np.mean(within)) ** 0.5,
         "between_pct": 100 * max(0.0, float(np.mean(between))) ** 0.5}
    )  # fmt: skip
    whole = float(np.mean(within)) + max(0.0, float(np.mean(between)))
    return Result(lines, [f"within a source of all: {(float(np.mean(within)) / whole) ** 0.5:.2f}"])
