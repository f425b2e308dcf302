"""Dispatchers of experts' rows against published measurements: which wins, and by how much.

    layer     one layer of experts on 8 H100, forward and backward, by dispatcher and precision
              (moe_layer.csv, Megatron-LM's moe_perf)
    pairs     the same training run under two dispatchers (moe_dispatch.csv, on EFA): sign and error
    routing   natural over forced routing of one layout (Qwen3-30B-A3B, 1.50 times on 16 H100, 1.90
              times on 8 GB200)

A layer alone runs as fast as benchmarks of single ops do: at rates of training runs its products
would wait for clocks that a long step sustains. Rows of a run do not say their network's links:
EFA's are 400 Gb/s a device on P5 and 800 on P6-B300. Records of dispatchers are fitted to some of
these figures (`costmodel/execution/data/dispatchers`), by a few constants each and none by row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED
from costmodel.execution import find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_program import price_program
from costmodel.table.kernels import load_rates
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from costmodel.topology import lowered_groups
from planner.language.layout.axes import Degrees
from planner.language.lowering.experts import spread_experts
from planner.language.templates import Experts, Transformer
from planner.language.templates.build import build_experts
from profiles import load_profile

PARTS = ("layer", "pairs", "routing")

ALONE = {
    "matmul_efficiency": 0.803,
    "low_precision_efficiency": 0.8826,
    "memory_efficiency": 0.85,
}
"""Rates of an H100 in short benchmarks: 794.5 of 989.4 TFLOP/s, in 8 bits 1,402.6 of 1,978.9
(ops.csv, MAMF), and the part of its memory's rate at which its shipped profile has ops that only
move bytes."""

EFA = {
    "B300-EFA": ("B300", "6400 Gb/s between nodes"),
    "H100-EFA": ("H100-SXM", "3200 Gb/s between nodes; P5 nodes"),
}
"""Devices of the pairs, and what rows do not say of their nodes of eight: P6-B300 and P5 of AWS."""

MODEL_OF = {"Qwen3-235B (96 layers)": {"model": "Qwen3-235B", "layers": "96"}}

SAME_RUN = ("model", "gpus", "gpu", "tp", "pp", "ep", "micro_batch", "overlap")
"""Columns that rows of a pair share."""

QWEN = {
    "stack": "megatron-core", "model": "Qwen3-30B-A3B", "seq_len": "4096", "tp": "1", "pp": "1",
    "cp": "1", "recompute": "none", "zero_stage": "1",
}  # fmt: skip
ROUTED = (
    (
        "16 H100",
        {"gpu": "H100-SXM", "gpus": "16", "dp": "16", "ep": "16", "dtype": "bf16",
         "micro_batch": "1", "global_batch": "1024"},
        (20.147, "HybridEP, CUDA graphs of router, all-to-all overlap"),
        (30.290, "HybridEP, CUDA graphs of router"),
    ),
    (
        "8 GB200",
        {"gpu": "GB200", "gpus": "8", "dp": "8", "ep": "8", "dtype": "mxfp8",
         "micro_batch": "4", "global_batch": "512"},
        (6.501, "HybridEP, CUDA graphs"),
        (12.362, "HybridEP, CUDA graphs of router"),
    ),
)  # fmt: skip
"""Runs that were measured with forced and with natural routing, of one layout: seconds of a step,
and what else was on in each (NVIDIA-NeMo/Megatron-Bridge at 067f987,
examples/model_verification_cards/qwen3-30b-a3b/card.yaml: pretrain_performance and pretrain)."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A measurement and its prediction, both in the same unit."""

    part: str
    """Which of `PARTS`."""
    case: str
    """What was measured."""
    measured: float
    """Milliseconds of a layer, seconds of a step, or a ratio."""
    predicted: float
    """The same."""
    group: tuple[str, ...] = ()
    """What pairs share."""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def layers(path: Path = PUBLISHED / "moe_layer.csv") -> Iterator[Priced]:
    """Yield forward and backward of each lone layer."""
    profile = load_profile("h100-sxm5-80gb")
    rates = replace(load_rates(profile), **ALONE)
    for row in _rows(path):
        execution = replace(
            find_execution("megatron-core"),
            dispatchers=(row["dispatcher"],),
            expert_imbalance=0.0,
            forward_kernels=0,  # there is no attention to issue
            scaling="tiles",
        )
        executed = ExecutedProfile(
            profile,
            rates,
            num_nodes=1,
            execution=execution,
            product_dtype="float8_e4m3fn" if row["precision"] == "fp8" else "bfloat16",
        )
        ep = int(row["ep"])
        local = spread_experts(build_experts(_layer(row)).bind(1), ep)
        axes = lowered_groups(profile.cluster, Degrees(dp=int(row["gpus"]), ep=ep))
        times = price_program(local, executed, axes=axes, execution=execution).times
        for name, seconds in (
            ("forward", times.whole_forward_s),
            ("backward", times.whole_backward_s),
        ):
            yield Priced(
                part="layer",
                case=f"{row['case']} {row['dispatcher']} {row['precision']} {name}",
                measured=float(row[f"{name}_ms"]),
                predicted=1e3 * seconds,
            )


def _layer(row: Mapping[str, str]) -> Transformer:
    """Return the layer that was measured: its cases name a shared expert, which the configuration
    that they are run with leaves out (moe_perf/__main__.py, _build_transformer_config).
    """
    width = int(row["moe_ffn"])
    return Transformer(
        layers=1,
        hidden=int(row["hidden"]),
        heads=32,
        kv_heads=32,
        ffn_hidden=width,
        gated=True,
        vocab=1024,
        seq_len=int(row["tokens_per_rank"]),
        norm="rms",
        positions="rotary",
        bias=False,
        tied=False,
        experts=Experts(
            number=int(row["experts"]),
            per_token=int(row["top_k"]),
            width=width,
        ),
    )


def runs(path: Path = PUBLISHED / "moe_dispatch.csv") -> Iterator[Priced]:
    """Yield each training run."""
    prices = RowPrices()
    for row in _rows(path):
        gpu, nodes = EFA[row["gpu"]]
        overlaps = "; all-to-all overlap" if row["overlap"] == "on" else ""
        columns = {
            **{name: row[name] for name in ("model", "gpus", "tp", "pp", "ep", "etp", "cp", "dp")},
            **{name: row[name] for name in ("micro_batch", "global_batch", "seq_len")},
            "stack": "megatron-core",
            "gpu": gpu,
            # Where stages of a rank are not printed, there are at least two.
            "vpp": "2" if row["vpp"] == "n" else row["vpp"],
            "dtype": row["precision"],
            "zero_stage": "1",
            "recompute": row["recompute"].rstrip("?"),
            "dispatcher": row["dispatcher"],
            "notes": f"force-balanced; {nodes}{overlaps}",
            **MODEL_OF.get(row["model"], {}),
        }
        found = prices.estimate(*run_of(columns))
        yield Priced(
            part="pairs",
            case=f"{row['model']} on {row['gpus']} {row['gpu']}, ep {row['ep']}, microbatch "
            f"{row['micro_batch']}, overlap {row['overlap']}: {row['dispatcher']}",
            measured=float(row["step_s"]),
            predicted=found.step_s,
            group=tuple(row[name] for name in SAME_RUN),
        )


def routings() -> Iterator[Priced]:
    """Yield how many times longer natural routing takes than forced, each with its own settings."""
    prices = RowPrices()
    for case, columns, forced, natural in ROUTED:
        told = [
            prices.estimate(
                *run_of({**QWEN, **columns, "notes": f"dispatcher {on}; {said}"})
            ).step_s
            for (_, on), said in ((forced, "force-balanced"), (natural, "natural routing"))
        ]
        yield Priced(
            part="routing",
            case=case,
            measured=natural[0] / forced[0],
            predicted=told[1] / told[0],
        )


def signs(found: list[Priced]) -> list[tuple[Priced, Priced]]:
    """Return the pairs of the same run under two dispatchers, the faster one first."""
    return [
        (a, b) if a.measured < b.measured else (b, a)
        for a, b in combinations(found, 2)
        if a.group == b.group
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@benchmark("dispatchers", quick={"parts": ("layer",)})
def dispatchers(*, parts: tuple[str, ...] = PARTS) -> Result:
    found: list[Priced] = []
    notes = []
    if "layer" in parts:
        of = list(layers())
        within = sum(abs(each.error) < 0.15 for each in of)
        notes.append(f"layer: {within} of {len(of)} within 15%, mean {_mean_error(of):.1%}")
        found += of
    if "pairs" in parts:
        of = list(runs())
        pairs = signs(of)
        right = sum(fast.predicted < slow.predicted for fast, slow in pairs)
        b300 = [each for each in of if "B300" in each.case]
        notes.append(
            f"pairs: {right} of {len(pairs)} signs, mean error {_mean_error(of):.1%} of {len(of)} "
            f"runs, {_mean_error(b300):.1%} of {len(b300)} on B300"
        )
        found += of
    if "routing" in parts:
        of = list(routings())
        notes.append(
            "routing: " + "; ".join(f"{p.case} {p.predicted:.2f} for {p.measured:.2f}" for p in of)
        )
        found += of
    return Result([_as_row(each) for each in found], notes)


def _as_row(priced: Priced) -> dict[str, Any]:
    return {
        "part": priced.part,
        "case": priced.case,
        "measured": priced.measured,
        "predicted": priced.predicted,
        "error_percent": 100 * priced.error,
    }


def _mean_error(found: list[Priced]) -> float:
    return fmean(abs(each.error) for each in found)
