"""Predictions against published, measured runs: error, bias, ranking and regret by source.

Each row becomes a template's graph, a plan and an execution, and is priced by the `estimate` that
picks plans. Rows are those of dense pre-training with a full layout; with `--experts` those of
mixtures of experts instead, to which nothing is fitted. The measured step time is the
printed one, else it follows from tokens or samples per second, else from TFLOP/s by the
source's own definition. `--held-out` fits each device again without a source, and without a
fifth of all rows, and prints how well those are predicted then. `--fit` adjusts a shipped
profile's few training rates to the rows of its device and writes them, with what they were
fitted on and the error that is left; `--free` holds all but some, and `--beside-goldens` adds the
half of Megatron-LM's goldens that is not kept aside.

Sources with stalled runs (`stalls`) get a second line without these, and `--stalled` lists them.
`--groups` ranks the layouts of each model, machine and batch; `--plot` draws predicted against
measured steps. `python -m docs.build.accuracy_page` prices all tables and writes docs/accuracy.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness import Result, benchmark, note
from benchmarks.published import PUBLISHED
from benchmarks.published.configured import as_configured
from benchmarks.published.fit_rates import (
    RANGES,
    MeasuredRun,
    PricedRuns,
    fit_rates,
    held_out_errors,
)
from benchmarks.published.goldens import GOLDENS, goldens_fitted
from benchmarks.published.groups import Ranking, rankings, write_plot
from costmodel.table.rows.model_counts import ModelCounts
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

TABLES = (
    ("Dense models", "measured.csv", False),
    ("Mixtures of experts", "measured.csv", True),
    ("Mixtures of experts, collected by hand", "moe_cp.csv", True),
    ("Dense models, collected by hand", "moe_cp.csv", False),
    ("MLPerf", "mlperf.csv", False),
    ("nanotron's Ultra-Scale Playbook", "ultrascale_playbook.csv", False),
)
"""Tables of published runs, and whether their rows with experts are meant."""

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
        return run.global_batch * run.sizes.seq_len / (tokens * run.gpus)
    if samples := value("samples_per_s"):
        return run.global_batch / samples
    if tflops := value("tflops_per_gpu"):
        flop = ModelCounts(run.sizes).model_flop(causal=row["source_id"] in COUNT_CAUSAL)
        if "hardware" in row["notes"].lower():  # full recompute counted: one more forward
            flop += run.sizes.layers * ModelCounts(run.sizes).layer_flop() / 3
        return flop * run.global_batch / (tflops * 1e12 * run.gpus)
    return None


def load_cases(
    path: Path, *, experts: bool = False, every: int = 1, sources: Collection[str] = ()
) -> tuple[list[Case], dict[str, int]]:
    """Return usable rows, and how many rows of each source were not, by reason; of one row of so
    many, and of some sources where these are given.

    Rows of mixtures of experts leave columns to the model's name, and need not be complete.
    """
    cases, refused = [], defaultdict(int)
    for row in map(as_configured, read_rows(path)[::every]):
        notes = f"{row['notes']} {row['model']}".lower()
        if sources and row["source_id"] not in sources:
            continue
        try:
            run, profile, rates = run_of(row)
            if not run.lora_rank and any(word in notes for word in NOT_PRETRAINING):
                raise PlannerError("not pre-training")
            if (run.sizes.experts is not None) != experts:
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
                group=(row["source_id"], row["model"], row["gpu"], row["gpu_mem_gb"], run.sizes,
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
            note(f"not a plan: {case.source}: {error}")
            continue
        kept.append(case)
        errors.append(step_s / case.step_s - 1)
    return kept, np.array(errors)


def stalls(cases: list[Case], errors: np.ndarray) -> np.ndarray:
    """Return which cases stalled, of those with tp in a node."""
    turns = np.array([case.run.num_microbatches + case.run.pp - 1 for case in cases])
    measured = np.array([case.step_s for case in cases])
    may = np.array([case.source == STALLING and case.run.tp <= 8 for case in cases], dtype=bool)
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
        part = needed_bytes(estimate) / case.room_bytes
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


def held_out_of(cases: list[Case]) -> dict[str, np.ndarray]:
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


def fitted_rates(
    name: str, cases: list[Case], *, free: Collection[str] = (), beside: Sequence[MeasuredRun] = ()
) -> TrainingRates:
    """Fit a device's rates to all of its rows, and to runs `beside` them, from usual values; where
    some are `free`, those alone, from the device's own, and the others stay as they are.
    """
    mine = [case for case in cases if case.device == name]
    others = [run for run in beside if run.profile.name.partition("@")[0] == name]
    previous = device_file(name).shipped.training
    start = {rate: previous.rates[rate].value for rate in RANGES} if free else None
    priced = PricedRuns([*mine, *others])
    values, told = fit_rates(priced, start=start, free=free or tuple(RANGES))
    left = priced.relative_errors(values, chosen=range(len(mine)))
    sources = sorted({case.source for case in mine})
    detail = f"fit to all {len(mine)} published rows of: {', '.join(sources)}"
    detail += f", and {len(others)} runs of Megatron-LM's goldens" if others else ""
    detail += "; all other rates held" if free else "; pulled a little to a usual value"
    rates = dict(previous.rates) if free else {"matmul_half_k": previous.rates["matmul_half_k"]}
    for rate, value in values.items():
        if free and rate not in told:
            continue
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


@benchmark("accuracy", quick={"every": 80})
def accuracy(
    *,
    rows: Path = PUBLISHED / "measured.csv",
    every: Annotated[int, "price one row of so many"] = 1,
    experts: Annotated[bool, "rows of mixtures of experts"] = False,
    held_out: Annotated[bool, "fit without each source and fifth, and predict it"] = False,
    fit: Annotated[str | None, "fit and write this profile's training rates"] = None,
    free: Annotated[tuple[str, ...], "fit these rates alone, the others held"] = (),
    beside_goldens: Annotated[bool, "fit to half of Megatron-LM's goldens, too"] = False,
    groups: Annotated[bool, "rank each group of layouts"] = False,
    stalled: Annotated[bool, "list runs held for stalled"] = False,
    fits: Annotated[bool, "whether what is said to fit is what ran"] = False,
    plot: Annotated[Path | None, "write a page of plots"] = None,
) -> Result:
    if unknown := [rate for rate in free if rate not in RANGES]:
        raise PlannerError(
            f"{unknown[0]} is no rate that is fitted; use some of {', '.join(RANGES)}"
        )
    if (free or beside_goldens) and not fit:
        raise PlannerError("rates to fit or goldens were given, and no profile; add --fit")
    if experts and (fit or held_out):
        raise PlannerError("nothing is fitted to rows with experts; leave --fit or --held-out out")
    cases, refused = load_cases(rows, experts=experts, every=every)
    if fits:
        found = fit_table(cases)
        return Result([{"source": source, **counts} for source, counts in found.items()])
    cases = [case for case in cases if case.ran]
    if not cases:
        raise PlannerError(f"no usable row in {rows}: {'; '.join(sorted(refused))}")
    # Nothing is fitted to runs that train adapters alone.
    if fit:
        told = [case for case in cases if not case.run.lora_rank]
        beside = goldens_fitted(rows.parent / f"{GOLDENS}.csv") if beside_goldens else []
        return fit_and_write(fit, told, free=free, beside=beside)
    cases, errors = estimated_errors(cases)
    stops = stalls(cases, errors)
    notes = [f"not used: {count:4}  {reason}" for reason, count in sorted(refused.items())]
    if stalled:
        notes += [told_of(case) for case, stopped in zip(cases, stops, strict=True) if stopped]
    if plot:
        write_plot(cases, errors, plot)
    if groups:
        return Result(rankings(cases, errors), notes)
    return Result(report(cases, errors, held_out_of(cases) if held_out else None, stops), notes)


def told_of(case: Case) -> str:
    """Return a stalled run's line."""
    run = case.run
    return (
        f"stalled: {case.nodes} nodes, {run.sizes.layers} layers, dp {run.dp} tp {run.tp} "
        f"pp {run.pp} of {run.micro_batch} samples, ZeRO {run.zero_stage}: {case.step_s:.1f} s"
    )


def fit_and_write(
    profile: str, cases: list[Case], *, free: Collection[str], beside: Sequence[MeasuredRun]
) -> Result:
    """Fit a device's rates and write them into its file."""
    name = load_profile(profile).name
    record = fitted_rates(name, cases, free=free, beside=beside)
    device = device_file(name)
    shipped = device.shipped.model_copy(update={"training": record})
    save_device(name, device.model_copy(update={"shipped": shipped}))
    return Result(
        [{"rate": rate, "value": figure.value, "origin": figure.origin}
         for rate, figure in record.rates.items()],
        [f"mean error left, {source}: {left}" for source, left in record.residuals.items()],
    )  # fmt: skip
