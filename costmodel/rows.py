"""Batches of rows in, predictions out: what `planner estimate --batch` does."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.devices import Device, device_of
from costmodel.kernels import DeviceRates
from costmodel.published import RunRow, estimate_run, estimate_run_memory, parse_row
from costmodel.rates import load_rates
from planner.errors import PlannerError
from planner.units import GB, GIB, TFLOP
from profiles import Profile, load_profile

PREDICTED = (
    "predicted_step_time_s",
    "predicted_tflops_per_gpu",
    "predicted_tokens_per_s_per_gpu",
    "predicted_peak_mem_gib",
    "predicted_fits",
    "assumed",
    "reason",
)
"""Columns added to each row; `reason` says why a row was not predicted."""

WIDER = ("float8_e4m3fn", "bfloat16")
"""What stands in for a narrower dtype that a device has no products in."""

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
    run, profile, rates = run_of(row)
    step_s = estimate_run(run, profile, rates).step_s
    samples_per_gpu_s = run.global_batch / step_s / run.gpus
    peak_bytes = estimate_run_memory(run).total
    room = _device_bytes(row, profile) - profile.context_bytes
    fits = peak_bytes * (1 + profile.allocator_overhead_fraction) <= room
    return {
        "predicted_step_time_s": step_s,
        "predicted_tflops_per_gpu": samples_per_gpu_s * run.shape.model_flop() / TFLOP,
        "predicted_tokens_per_s_per_gpu": samples_per_gpu_s * run.shape.seq_len,
        "predicted_peak_mem_gib": peak_bytes / GIB,
        "predicted_fits": "yes" if fits else "no",
        "assumed": "; ".join(run.assumed),
    }


def run_of(row: Mapping[str, Any]) -> tuple[RunRow, Profile, DeviceRates]:
    """Return the run a row describes, and the machine it is priced on.

    Products in a dtype the device does not have are priced in the next wider one.
    """
    run = parse_row(row)
    profile, rates, assumed = machine_of(row)
    assumed = (*run.assumed, *assumed)
    if run.dtype not in rates.peak_flop_per_s:
        wider = next(name for name in WIDER if name in rates.peak_flop_per_s)
        assumed = (*assumed, f"dtype={wider}: {profile.cluster.device} has no {run.dtype}")
        run = replace(run, dtype=wider)
    return replace(run, assumed=assumed), profile, rates


def _device_bytes(row: Mapping[str, Any], profile: Profile) -> float:
    """Memory of the row's device: as it says, else of the device's data sheet."""
    stated = _memory_gb(row) or device_of(str(row.get("gpu") or "")).memory_gb
    return profile.memory_bytes if stated is None else stated * GB


def machine_of(row: Mapping[str, Any]) -> tuple[Profile, DeviceRates, tuple[str, ...]]:
    """Return the profile and rates of a row's GPU, and what was assumed of its network.

    A rate between nodes printed in the notes (``800 Gb/s between nodes``) picks the link.
    """
    assumed = []
    device = device_of(str(row.get("gpu") or ""), _memory_gb(row))
    if not device.is_kin:
        assumed.append(f"rates={device.kin} scaled to {device.name}")
    printed = _BETWEEN_NODES.search(str(row.get("notes") or ""))
    link = _nearest_link(device.kin, float(printed[1]) / 8) if printed else ""
    profile, rates = _machine(f"{device.kin}@{link}" if link else device.kin, device)
    if not printed:
        assumed.append(f"network={profile.cluster.inter_node.name}")
    return profile, rates, tuple(assumed)


def _memory_gb(row: Mapping[str, Any]) -> float | None:
    try:
        return float(row.get("gpu_mem_gb") or "")
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _machine(name: str, device: Device) -> tuple[Profile, DeviceRates]:
    profile = load_profile(name)
    if device.devices_per_node is not None:
        cluster = profile.file.cluster.model_copy(
            update={"devices_per_node": device.devices_per_node}
        )
        profile = Profile(profile.file.model_copy(update={"cluster": cluster}))
    link = 1 / profile.cluster.intra_node.beta_s_per_byte
    return profile, device.scaled(load_rates(profile), kin_link_bytes_per_s=link)


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
