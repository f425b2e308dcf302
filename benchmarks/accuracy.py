"""Predictions against published, measured runs: error, bias, ranking and regret by source.

    python benchmarks/accuracy.py [measured.csv] [--json] [--fit PROFILE]

Rows are those of dense pre-training with a full layout. The measured step time is the
printed one, else it follows from tokens or samples per second, else from TFLOP/s by the
source's own definition. `--fit` adjusts a shipped profile's few training rates to the rows
of its device and writes them, with what they were fitted on and the error that is left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.kernels import DeviceRates
from costmodel.published import RunRow, estimate_run, estimate_run_memory, parse_row
from costmodel.rates import FITTED, TrainingRates, save_rates
from costmodel.rows import machine_of, read_rows
from planner.errors import PlannerError
from planner.units import GIB
from profiles import Profile, load_profile
from profiles.catalog import SHIPPED
from profiles.records import Figure

DEFAULT_ROWS = Path(__file__).resolve().parents[2] / "shared/data/published/measured.csv"
NOT_PRETRAINING = ("lora", "sft", "finetun", "fine-tun")

BOUNDS = {
    "matmul_efficiency": (0.4, 0.98),
    "matmul_half_k": (5.0, 1000.0),
    "memory_efficiency": (0.3, 1.0),
    "attention_efficiency": (0.2, 1.0),
    "portable_attention_efficiency": (0.1, 1.0),
    "kernel_s": (1e-6, 1e-5),
    "host_op_s": (5e-6, 1e-4),
    "host_backward_op_s": (2e-6, 1e-4),
    "skew_s": (1e-6, 5e-4),
    "link_efficiency": (0.3, 1.2),
    "network_efficiency": (0.3, 1.2),
    "low_precision_efficiency": (0.4, 1.0),
    "misaligned_efficiency": (0.1, 1.0),
    "launch_wait_s": (5e-6, 3e-4),
}
"""Physically sensible ranges of the fitted rates."""

SIMPLEX_STEP = 0.12
SIMPLEXES = 4
ERROR_CAP = 0.4
"""A row that is wrong by more is wrong for another reason than the rates."""


@dataclass(frozen=True)
class Case:
    """A usable row: what ran, where, how long it took, and its memory where it is exact."""

    source: str
    group: tuple
    nodes: int
    run: RunRow
    profile: Profile
    rates: DeviceRates
    measured_s: float
    measured_gib: float | None


def measured_seconds(row: dict[str, str], run: RunRow) -> float | None:
    """Return the step time a row states or implies."""

    def value(name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    if step := value("step_time_s"):
        return step
    if tokens := value("tokens_per_s_per_gpu"):
        return run.global_batch * run.shape.seq_len / (tokens * run.gpus)
    if samples := value("samples_per_s"):
        return run.global_batch / samples
    if tflops := value("tflops_per_gpu"):
        flop = run.shape.model_flop()
        if "hardware" in row["notes"].lower():  # full recompute counted: one more forward
            flop += run.shape.layers * run.shape.layer_flop() / 3
        return flop * run.global_batch / (tflops * 1e12 * run.gpus)
    return None


def load_cases(path: Path) -> tuple[list[Case], dict[str, int]]:
    """Return usable rows, and how many rows of each source were not, by reason."""
    cases, refused = [], defaultdict(int)
    for row in read_rows(path):
        notes = row["notes"].lower()
        try:
            if any(word in notes for word in NOT_PRETRAINING):
                raise PlannerError("not pre-training")
            run = parse_row(row)
            profile, rates, _ = machine_of(row)
            if run.dtype not in rates.peak_flop_per_s:
                raise PlannerError(f"{run.dtype} is not a dtype of {profile.name}")
        except PlannerError as error:
            refused[f"{row['source_id']}: {error}"] += 1
            continue
        seconds = measured_seconds(row, run)
        if seconds is None:
            refused[f"{row['source_id']}: no time printed"] += 1
            continue
        exact = row["peak_mem_gib"] and "max allocated" in notes
        cases.append(
            Case(
                source=row["source_id"],
                group=(row["source_id"], row["model"], run.shape, run.gpus, run.global_batch,
                       row["dtype"], row["seq_len"]),
                nodes=-(-run.gpus // 8),
                run=run,
                profile=profile,
                rates=rates,
                measured_s=seconds,
                measured_gib=float(row["peak_mem_gib"]) if exact else None,
            )
        )  # fmt: skip
    return cases, dict(refused)


def relative_errors(cases: list[Case]) -> np.ndarray:
    """Return predicted over measured step time, minus one."""
    return np.array(
        [estimate_run(c.run, c.profile, c.rates).step_s / c.measured_s - 1 for c in cases]
    )


def kendall_tau(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Agreement of two rankings: pairs ordered alike minus otherwise, over all pairs."""
    first, second = np.triu_indices(len(measured), k=1)
    signs = np.sign(predicted[first] - predicted[second]) * np.sign(
        measured[first] - measured[second]
    )
    return float(signs.mean())


def rankings(cases: list[Case], errors: np.ndarray) -> tuple[float | None, float | None]:
    """Return mean Kendall tau and mean regret over groups of one model, GPUs and batch."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        groups[case.group].append(index)
    taus, regrets = [], []
    for members in groups.values():
        if len(members) < 2:
            continue
        measured = np.array([cases[i].measured_s for i in members])
        predicted = measured * (1 + errors[members])
        taus.append(kendall_tau(predicted, measured))
        regrets.append(measured[predicted.argmin()] / measured.min() - 1)
    return (float(np.mean(taus)), float(np.mean(regrets))) if taus else (None, None)


def report(cases: list[Case]) -> list[dict]:
    """Return one line of figures per source, then for single and multi-node rows, and all."""
    errors = relative_errors(cases)
    sources = list(dict.fromkeys(c.source for c in cases))
    masks = {s: np.array([c.source == s for c in cases]) for s in sources}
    single = np.array([c.nodes == 1 for c in cases])
    masks |= {"ALL single node": single, "ALL multi node": ~single}
    lines = []
    for name, mask in masks.items():
        if not mask.any():
            continue
        chosen = [c for c, keep in zip(cases, mask, strict=True) if keep]
        e = errors[mask]
        tau, regret = rankings(chosen, e)
        memory = [
            estimate_run_memory(c.run).total / GIB / c.measured_gib - 1
            for c in chosen
            if c.measured_gib
        ]
        lines.append(
            {
                "source": name,
                "rows": len(chosen),
                "mape_pct": 100 * float(np.abs(e).mean()),
                "median_ape_pct": 100 * float(np.median(np.abs(e))),
                "bias_pct": 100 * float(e.mean()),
                "kendall_tau": tau,
                "regret_pct": None if regret is None else 100 * regret,
                "memory_mape_pct": 100 * float(np.abs(memory).mean()) if memory else None,
            }
        )
    return lines


def fit(name: str, cases: list[Case], *, evaluations: int) -> TrainingRates:
    """Fit a device's rates to its rows by the simplex method of Nelder and Mead, starting
    from the rates the profile has and again from what it finds, with a fresh simplex.
    Minimises the mean absolute relative error, each row's capped, and a source of many rows
    weighing less per row so that a large sweep does not silence the rest.
    """
    from scipy.optimize import minimize

    mine = [c for c in cases if c.profile.name.partition("@")[0] == name]
    counts = {s: sum(c.source == s for c in mine) for s in {c.source for c in mine}}
    weight = np.array([max(counts[c.source], 10) ** -0.1 for c in mine])
    weight /= weight.sum()
    low, high = np.log([BOUNDS[r][0] for r in FITTED]), np.log([BOUNDS[r][1] for r in FITTED])
    start = np.clip(np.log([getattr(mine[0].rates, rate) for rate in FITTED]), low, high)

    def errors(x: np.ndarray) -> np.ndarray:
        values = dict(zip(FITTED, map(float, np.exp(np.clip(x, low, high))), strict=True))
        return relative_errors([replace(c, rates=replace(c.rates, **values)) for c in mine])

    best = start
    for _ in range(SIMPLEXES):
        step = np.where(best + SIMPLEX_STEP < high, SIMPLEX_STEP, -SIMPLEX_STEP)
        found = minimize(
            lambda x: float(weight @ np.minimum(np.abs(errors(x)), ERROR_CAP)),
            best,
            method="Nelder-Mead",
            options={
                "initial_simplex": np.vstack([best, best + np.diag(step)]),
                "maxfev": evaluations // SIMPLEXES,
                "adaptive": True,
            },
        )
        best = np.clip(found.x, low, high)
    left = errors(best)
    detail = f"fit to {len(mine)} published rows: {', '.join(sorted(counts))}"
    path = SHIPPED / name / "training.json"
    previous = json.loads(path.read_text())["num_multiprocessors"]
    return TrainingRates(
        num_multiprocessors=Figure.model_validate(previous),
        rates={
            rate: Figure(value=float(f"{v:.4g}"), origin="fitted", detail=detail)
            for rate, v in zip(FITTED, np.exp(best), strict=True)
        },
        residuals={
            s: round(float(np.abs(left[[c.source == s for c in mine]]).mean()), 4)
            for s in sorted(counts)
        },
    )  # fmt: skip


def main() -> int:
    """Print the table, or fit a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT_ROWS)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--fit", metavar="PROFILE", help="fit and write a profile's training rates")
    parser.add_argument("--evaluations", type=int, default=600, help="of the fit's criterion")
    options = parser.parse_args()
    try:
        cases, refused = load_cases(options.rows)
    except PlannerError as error:
        print(error, file=sys.stderr)
        return 2
    if options.fit:
        name = load_profile(options.fit).name
        record = fit(name, cases, evaluations=options.evaluations)
        save_rates(SHIPPED / name / "training.json", record)
        print(json.dumps({k: v.value for k, v in record.rates.items()}, indent=1))
        print(json.dumps(record.residuals, indent=1))
        return 0
    lines = report(cases)
    if options.json:
        print(json.dumps({"lines": lines, "refused": refused}, indent=1))
        return 0
    titles = ("rows", "MAPE", "median", "bias", "tau", "regret", "memory")
    print(f"{'source':24}{titles[0]:>6}" + "".join(f"{title:>8}" for title in titles[1:]))
    for line in lines:
        cells = [line["mape_pct"], line["median_ape_pct"], line["bias_pct"], line["kendall_tau"],
                 line["regret_pct"], line["memory_mape_pct"]]  # fmt: skip
        texts = ["-" if v is None else f"{v:.2f}" for v in cells]
        print(f"{line['source']:24}{line['rows']:6}" + "".join(f"{t:>8}" for t in texts))
    for reason, count in sorted(refused.items()):
        print(f"not used: {count:4}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
