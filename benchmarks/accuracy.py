"""Predictions against published, measured runs: error, bias, ranking and regret by source.

    python benchmarks/accuracy.py [rows.csv] [--json] [--experts] [--held-out] [--fit PROFILE]
    python benchmarks/accuracy.py ... [--fits] [--stalled] [--groups] [--plot FILE]
    python benchmarks/accuracy.py --page docs/accuracy.md [--held-out]

Each row becomes a template's graph, a plan and an execution, and is priced by the `estimate` that
picks plans. Rows are those of dense pre-training with a full layout; with `--experts` those of
mixtures of experts instead, to which nothing is fitted. The measured step time is the
printed one, else it follows from tokens or samples per second, else from TFLOP/s by the
source's own definition. `--held-out` fits each device again without a source, and without a
fifth of all rows, and prints how well those are predicted then. `--fit` adjusts a shipped
profile's few training rates to the rows of its device and writes them, with what they were
fitted on and the error that is left.

`--fits` adds whether what is said to fit is what ran. Sources with stalled runs (`stalls`) get a
second line without these, and `--stalled` lists them. `--groups` ranks the layouts of each model,
machine and batch; `--plot` draws predicted against measured steps. `--page` prices all tables
beside `rows.csv` and writes what they show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accuracy_configured import as_configured
from accuracy_groups import Ranking, plot, print_rankings, rankings
from accuracy_page import TITLES, Section, cells_of, write_page
from fit_rates import RANGES, MeasuredRun, PricedRuns, fit_rates, held_out_errors

from costmodel.table.rows.named_models import named_model
from costmodel.table.rows.row_files import read_rows
from costmodel.table.rows.row_plan import RowPrices, is_nearly_full, needed_bytes
from costmodel.table.rows.rows import device_bytes, run_of
from costmodel.table.rows.run_row import RunRow
from planner.errors import PlannerError
from planner.units import GIB
from profiles import load_profile
from profiles.devices import TrainingRates, device_file, save_device
from profiles.records import Figure

DEFAULT_ROWS = Path(__file__).resolve().parents[2] / "shared/data/published/measured.csv"
NOT_PRETRAINING = ("lora", "sft", "finetun", "fine-tun")

FULL_LAYOUT = ("layers", "hidden", "heads", "seq_len", "global_batch", "tp", "pp", "dp")
"""Columns a row must fill to be held against its measurement."""

MODEL_SIZES = ("layers", "hidden", "heads")
"""Those of them that the name of a well-known model states."""

COUNT_CAUSAL = ("moecp_Megatron-LM", "moecp_Megatron-MoE-ModelZoo")
"""Sources that print TFLOP/s alone, of attention between positions that see each other
(Megatron-LM's num_floating_point_operations since core_v0.12.0; Megatron-Bridge's rows, which print
tokens/s too, agree with it to 0.3%)."""

STALLING = "ultrascale_playbook"
STALL_S = 0.3
"""A run of that source stalls where each microbatch's turn takes this much longer than estimated.

Its runs are of two kinds. Most are within 0.1 s a turn of the estimate. The others take about 0.5 s
a turn more with two stages and 1 s with more, a quarter second for each message whatever its size:
of a 1B model as of an 8B, with tp 1 as with tp 8, on one node as on 64. All that printed more than
70 GiB do, as an allocator that is full frees, waits for the device and allocates again; and nearly
all on 64 nodes. Nothing that a row says tells the rest apart.
"""

FAR_FROM_FULL = 0.4
"""A run that needs less of its device, as the walk has it, crashed for something else: 2 of the
1,027 runs of the Ultra-Scale Playbook that ran print more than 2.5 times the walk."""

FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class Case(MeasuredRun):
    """A usable row: its source, the rows it can be ranked with, its memory where it is exact."""

    source: str
    group: tuple
    nodes: int
    measured_gib: float | None
    ran: bool
    room_bytes: float

    @property
    def device(self) -> str:
        """Return the profile its rates are of."""
        return self.profile.name.partition("@")[0]


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
        flop = run.shape.model_flop(causal=row["source_id"] in COUNT_CAUSAL)
        if "hardware" in row["notes"].lower():  # full recompute counted: one more forward
            flop += run.shape.layers * run.shape.layer_flop() / 3
        return flop * run.global_batch / (tflops * 1e12 * run.gpus)
    return None


def load_cases(path: Path, *, experts: bool = False) -> tuple[list[Case], dict[str, int]]:
    """Return usable rows, and how many rows of each source were not, by reason.

    Rows of mixtures of experts leave columns to the model's name, and need not be complete.
    """
    cases, refused = [], defaultdict(int)
    for row in map(as_configured, read_rows(path)):
        notes = f"{row['notes']} {row['model']}".lower()
        try:
            run, profile, rates = run_of(row)
            if not run.lora_rank and any(word in notes for word in NOT_PRETRAINING):
                raise PlannerError("not pre-training")
            if (run.shape.num_experts > 1) != experts:
                raise PlannerError("a dense model" if experts else "a mixture of experts")
            known = MODEL_SIZES if named_model(row["model"]) else ()
            if not experts and not all(row[name] or name in known for name in FULL_LAYOUT):
                raise PlannerError("the layout is not complete")
        except PlannerError as error:
            refused[f"{row['source_id']}: {error}"] += 1
            continue
        seconds = measured_seconds(row, run)
        if seconds is None and row.get("outcome", "").startswith("crashed"):
            seconds = float("nan")
        if seconds is None:
            refused[f"{row['source_id']}: no time printed"] += 1
            continue
        exact = row["peak_mem_gib"] and "max allocated" in notes
        cases.append(
            Case(
                source=row["source_id"],
                group=(row["source_id"], row["model"], row["gpu"], row["gpu_mem_gb"], run.shape,
                       run.gpus, run.global_batch, row["dtype"]),
                nodes=-(-run.gpus // 8),
                run=run,
                profile=profile,
                rates=rates,
                step_s=seconds,
                measured_gib=float(row["peak_mem_gib"]) if exact else None,
                ran=row.get("outcome", "ok") == "ok",
                room_bytes=device_bytes(row, profile),
            )
        )  # fmt: skip
    return cases, dict(refused)


def means_of(found: list[Ranking]) -> tuple[float | None, float | None, float | None]:
    """Return mean Kendall tau, and mean and median regret, of groups."""
    if not found:
        return None, None, None
    regrets = [group.regret for group in found]
    taus = [group.kendall_tau for group in found]
    return float(np.mean(taus)), float(np.mean(regrets)), float(np.median(regrets))


def estimated_errors(cases: list[Case]) -> tuple[list[Case], np.ndarray]:
    """Return the cases that make a plan, and the relative errors of their estimated steps."""
    prices, kept, errors = RowPrices(), [], []
    for case in cases:
        try:
            step_s = prices.step_seconds(
                case.run, case.profile, case.rates, room_bytes=case.room_bytes
            )
        except PlannerError as error:
            print(f"not a plan: {case.source}: {error}", file=sys.stderr)
            continue
        kept.append(case)
        errors.append(step_s / case.step_s - 1)
    return kept, np.array(errors)


def stalls(cases: list[Case], errors: np.ndarray) -> np.ndarray:
    """Return which cases stalled, of those with tp in a node."""
    turns = np.array([case.run.num_microbatches + case.run.pp - 1 for case in cases])
    measured = np.array([case.step_s for case in cases])
    may = np.array([case.source == STALLING and case.run.tp <= 8 for case in cases])
    return may & (-errors * measured / turns > STALL_S)


def estimated_memory_bytes(case: Case) -> float:
    """Return the live tensors of a case's fullest rank, walked job by job."""
    found = RowPrices().estimate(case.run, case.profile, case.rates)
    return max(float(parts.tensor_bytes) for parts in found.memory)


def fit_table(cases: list[Case]) -> dict[str, dict[str, int]]:
    """Return, by source, how many runs that ran, and that crashed, are said to fit, nearly to fill
    the device, and not to fit.
    """
    prices = RowPrices()
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for case in cases:
        try:
            estimate = prices.estimate(case.run, case.profile, case.rates)
        except PlannerError:
            continue
        part = needed_bytes(estimate, case.run) / case.room_bytes
        said = "does not fit" if part > 1 else "fits"
        if part <= 1 and is_nearly_full(estimate, case.run, case.room_bytes):
            said = "nearly full"
        if not case.ran and part < FAR_FROM_FULL:
            said = "far from full"
        found[case.source][f"{'ran' if case.ran else 'crashed'}, said: {said}"] += 1
    return {source: dict(counts) for source, counts in found.items()}


def report(
    cases: list[Case],
    errors: np.ndarray,
    held_out: dict[str, np.ndarray] | None = None,
    stalled: np.ndarray | None = None,
) -> list[dict]:
    """Return one line of figures per source, then for rows of one node, of several, in 8 bits.

    `errors` are those of the cases, `held_out` those of the same cases under rates that were not
    fitted to them, by name. Sources with `stalled` cases get a second line without them.
    """
    sources = list(dict.fromkeys(c.source for c in cases))
    masks = {s: np.array([c.source == s for c in cases]) for s in sources}
    if stalled is not None:
        masks |= {
            f"{s}, no stalls": masks[s] & ~stalled for s in sources if (masks[s] & stalled).any()
        }
    single = np.array([c.nodes == 1 for c in cases])
    narrow = np.array([c.run.dtype.startswith(("float8", "float4")) for c in cases])
    masks |= {"ALL single node": single, "ALL multi node": ~single, "ALL in 8 bits": narrow}
    lines = []
    for name, mask in masks.items():
        if not mask.any():
            continue
        chosen = [c for c, keep in zip(cases, mask, strict=True) if keep]
        e = errors[mask]
        tau, regret, median_regret = means_of(rankings(chosen, e))
        memory = [
            estimated_memory_bytes(c) / GIB / c.measured_gib - 1 for c in chosen if c.measured_gib
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
                "median_regret_pct": None if median_regret is None else 100 * median_regret,
                "memory_mape_pct": 100 * float(np.abs(memory).mean()) if memory else None,
                **{
                    f"{part}_mape_pct": 100 * float(np.abs(unseen[mask]).mean())
                    for part, unseen in (held_out or {}).items()
                },
            }
        )
    return lines


def held_out(cases: list[Case]) -> dict[str, np.ndarray]:
    """Return errors of each case where its source, or its fifth of all, was left out of the fit.

    Every device is fitted again without them, from the rates it has.
    """
    folds = np.random.default_rng(0).permutation(len(cases)) % FOLDS
    parts = {
        "without_source": [case.source for case in cases],
        "without_fifth": [str(fold) for fold in folds],
    }
    errors = {name: np.zeros(len(cases)) for name in parts}
    for device in sorted({case.device for case in cases}):
        mine = [i for i, case in enumerate(cases) if case.device == device]
        priced = PricedRuns([cases[i] for i in mine])
        start = {name: getattr(cases[mine[0]].rates, name) for name in RANGES}
        for name, part in parts.items():
            errors[name][mine] = held_out_errors(priced, [part[i] for i in mine], start=start)
    return errors


def fit(name: str, cases: list[Case]) -> TrainingRates:
    """Fit a device's rates to all of its rows, from usual values."""
    mine = [case for case in cases if case.device == name]
    priced = PricedRuns(mine)
    values, told = fit_rates(priced)
    left = priced.relative_errors(values)
    sources = sorted({case.source for case in mine})
    detail = (
        f"fit to all {len(mine)} published rows of: {', '.join(sources)}; pulled a little to a "
        "usual value"
    )
    previous = device_file(name).shipped.training
    rates = {"matmul_half_k": previous.rates["matmul_half_k"]}
    for rate, value in values.items():
        origin = "fitted" if rate in told else "assumed"
        why = detail if rate in told else "a usual value: no published rows tell it here"
        rates[rate] = Figure(value=float(f"{value:.4g}"), origin=origin, detail=why)
    return TrainingRates(
        num_multiprocessors=previous.num_multiprocessors,
        rates=rates,
        residuals={
            source: round(float(np.abs(left[[c.source == source for c in mine]]).mean()), 4)
            for source in sources
        },
    )


TABLES = (
    ("Dense models", "measured.csv", False),
    ("Mixtures of experts", "measured.csv", True),
    ("Mixtures of experts, collected by hand", "moe_cp.csv", True),
    ("Dense models, collected by hand", "moe_cp.csv", False),
    ("MLPerf", "mlperf.csv", False),
    ("nanotron's Ultra-Scale Playbook", "ultrascale_playbook.csv", False),
)
"""Tables of published runs, and whether their rows with experts are meant."""


def sections_of(folder: Path, *, with_held_out: bool) -> list[Section]:
    """Return what all tables in a folder show; rates are fitted to dense models alone."""
    sections = []
    for title, file, experts in TABLES:
        cases, _ = load_cases(folder / file, experts=experts)
        fits = fit_table(cases)
        cases, errors = estimated_errors([case for case in cases if case.ran])
        stalled = stalls(cases, errors)
        unseen = None
        if with_held_out and file == DEFAULT_ROWS.name and not experts:
            unseen = held_out(cases)
        lines = report(cases, errors, unseen, stalled)
        sections.append(Section(title=title, file=file, lines=tuple(lines), fits=fits))
    return sections


def captured_table() -> str:
    """Return the table of `captured_rows`, which another process makes: where this script runs,
    `search` is the benchmark beside it.
    """
    command = [sys.executable, "-m", "benchmarks.captured_rows"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.rstrip()


def main() -> int:
    """Print the table, write the page, or fit a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT_ROWS)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--experts", action="store_true", help="rows of mixtures of experts")
    parser.add_argument("--fit", metavar="PROFILE", help="fit and write a profile's training rates")
    parser.add_argument(
        "--held-out", action="store_true", help="fit without each source and fifth, and predict it"
    )
    parser.add_argument("--groups", action="store_true", help="ranking of each group of layouts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a page of plots")
    parser.add_argument("--stalled", action="store_true", help="list runs held for stalled")
    parser.add_argument(
        "--fits", action="store_true", help="whether what is said to fit is what ran"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write what all tables show")
    options = parser.parse_args()
    if options.page:
        try:
            found = sections_of(options.rows.parent, with_held_out=options.held_out)
        except PlannerError as error:
            print(error, file=sys.stderr)
            return 2
        write_page(options.page, found, captured_table())
        return 0
    try:
        cases, refused = load_cases(options.rows, experts=options.experts)
    except PlannerError as error:
        print(error, file=sys.stderr)
        return 2
    if not cases:
        print(f"no usable row in {options.rows}: {'; '.join(sorted(refused))}", file=sys.stderr)
        return 2
    if options.experts and (options.fit or options.held_out):
        print("nothing is fitted to rows with experts; leave --fit or --held-out out",
              file=sys.stderr)  # fmt: skip
        return 2
    # Nothing is fitted to runs that train adapters alone.
    fitted = [case for case in cases if case.ran and not case.run.lora_rank]
    if options.fit:
        name = load_profile(options.fit).name
        record = fit(name, fitted)
        device = device_file(name)
        shipped = device.shipped.model_copy(update={"training": record})
        save_device(name, device.model_copy(update={"shipped": shipped}))
        print(json.dumps({k: v.value for k, v in record.rates.items()}, indent=1))
        print(json.dumps(record.residuals, indent=1))
        return 0
    if options.fits:
        for source, counts in fit_table(cases).items():
            for what, count in sorted(counts.items()):
                print(f"{source:32}{count:5}  {what}")
    cases, errors = estimated_errors([case for case in cases if case.ran])
    stalled = stalls(cases, errors)
    if options.stalled:
        for case in (c for c, stops in zip(cases, stalled, strict=True) if stops):
            run = case.run
            layout = f"dp {run.dp} tp {run.tp} pp {run.pp} of {run.micro_batch}"
            print(f"stalled: {case.nodes} nodes, {run.shape.layers} layers, {layout} samples, "
                  f"ZeRO {run.zero_stage}: {case.step_s:.1f} s")  # fmt: skip
    lines = report(cases, errors, held_out(cases) if options.held_out else None, stalled)
    if options.groups:
        print_rankings(rankings(cases, errors))
    if options.plot:
        plot(cases, errors, options.plot)
    if options.json:
        print(json.dumps({"lines": lines, "refused": refused}, indent=1))
        return 0
    print(f"{'source':32}" + "".join(f"{title:>9}" for title in TITLES.values()))
    for line in lines:
        texts = cells_of(line, digits=2)
        print(f"{line['source']:32}" + "".join(f"{text:>9}" for text in texts))
    for reason, count in sorted(refused.items()):
        print(f"not used: {count:4}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
