"""Batches of rows in, predictions out: what `planner estimate --batch` does."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.kernels import DeviceRates
from costmodel.published import RunRow, estimate_run, estimate_run_memory, parse_row
from costmodel.rates import load_rates
from planner.errors import PlannerError
from planner.units import GIB, TFLOP
from profiles import Profile, load_profile

PREDICTED = (
    "predicted_step_time_s",
    "predicted_tflops_per_gpu",
    "predicted_tokens_per_s_per_gpu",
    "predicted_peak_mem_gib",
    "assumed",
    "reason",
)
"""Columns added to each row; `reason` says why a row was not predicted."""

_DEVICES = (
    ("A100-PCIE", "a100-pcie-80gb"),
    ("A100", "a100-sxm4-80gb"),
    ("A800", "a100-sxm4-80gb"),
    ("H100", "h100-sxm5-80gb"),
    ("H800", "h100-sxm5-80gb"),
    ("H200", "h200-sxm-141gb"),
    ("GB200", "b200-sxm"),
    ("B200", "b200-sxm"),
)
_BETWEEN_NODES = re.compile(r"([\d.]+)\s*Gb(?:ps|/s)?\s*(?:node-node|between nodes)", re.I)


def estimate_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each row with its prediction, or with the reason there is none."""
    for row in rows:
        predicted = dict.fromkeys(PREDICTED, "")
        try:
            predicted |= predict_row(row)
        except PlannerError as error:
            predicted["reason"] = str(error)
        yield {**row, **predicted}


def predict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicted columns of one row; raise PlannerError when it can't be priced."""
    run = parse_row(row)
    profile, rates, assumed = machine_of(row)
    step_s = estimate_run(run, profile, rates).step_s
    samples_per_gpu_s = run.global_batch / step_s / run.gpus
    return {
        "predicted_step_time_s": step_s,
        "predicted_tflops_per_gpu": samples_per_gpu_s * run.shape.model_flop() / TFLOP,
        "predicted_tokens_per_s_per_gpu": samples_per_gpu_s * run.shape.seq_len,
        "predicted_peak_mem_gib": estimate_run_memory(run).total / GIB,
        "assumed": "; ".join((*run.assumed, *assumed)),
    }


def machine_of(row: Mapping[str, Any]) -> tuple[Profile, DeviceRates, tuple[str, ...]]:
    """Return the profile and rates of a row's GPU, and what was assumed of its network.

    A rate between nodes printed in the notes (``800 Gb/s between nodes``) picks the link.
    """
    gpu = str(row.get("gpu") or "").upper()
    name = next((profile for word, profile in _DEVICES if word in gpu), None)
    if name is None:
        raise PlannerError(f"gpu {row.get('gpu')!r} has no profile; known: A100, H100, H200, B200")
    printed = _BETWEEN_NODES.search(str(row.get("notes") or ""))
    link = ""
    if printed:
        per_gpu = float(printed[1]) / 8
        link = _nearest_link(name, per_gpu)
    profile, rates = _machine(f"{name}@{link}" if link else name)
    inter_node = profile.cluster.inter_node.name
    return profile, rates, () if printed else (f"network={inter_node}",)


@lru_cache(maxsize=32)
def _machine(name: str) -> tuple[Profile, DeviceRates]:
    profile = load_profile(name)
    return profile, load_rates(profile)


@lru_cache(maxsize=64)
def _nearest_link(name: str, gigabit_per_s: float) -> str:
    """The shipped link variant nearest to a rate per GPU; empty for the default one."""
    record = load_profile(name).file.cluster
    links = {"": record.inter_node, **record.other_inter_node}
    return min(links, key=lambda k: abs(8e-9 / links[k].beta_s_per_byte.value / gigabit_per_s - 1))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV of rows. Raises PlannerError when it is missing or has no columns we know."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            columns = reader.fieldnames or []
    except FileNotFoundError:
        raise PlannerError(f"no file {path}; give a CSV of runs") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlannerError(f"{path} is not a readable CSV ({error})") from None
    missing = [name for name in ("gpu", "layers", "hidden", "seq_len") if name not in columns]
    if missing:
        raise PlannerError(
            f"{path} lacks column {', '.join(missing)}; use the columns stack, gpu, layers, "
            "hidden, heads, …, as docs/estimate-rows.md lists"
        )
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as CSV and return how many; columns are those of the first."""
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else list(PREDICTED))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def estimate_file(source: Path, target: Path) -> tuple[int, int]:
    """Predict every row of a CSV file into another; return (rows, rows predicted)."""
    rows = list(estimate_rows(read_rows(source)))
    write_rows(target, rows)
    return len(rows), sum(not row["reason"] for row in rows)


__all__ = ["PREDICTED", "RunRow", "estimate_file", "estimate_rows", "predict_row"]
