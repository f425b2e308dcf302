"""Rows in, predictions out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.estimate import Estimate
from costmodel.table.kernels import DeviceRates, load_rates
from costmodel.table.rows.devices import device_of, is_scaled, scaled_rates
from costmodel.table.rows.model_counts import ModelCounts
from costmodel.table.rows.row_files import read_rows, write_rows
from costmodel.table.rows.row_plan import RowPrices, is_nearly_full, needed_bytes, retry_seconds
from costmodel.table.rows.row_words import RowError, real
from costmodel.table.rows.run_row import RunRow, parse_row
from planner.errors import PlannerError
from planner.units import GIB, TFLOP
from profiles import Profile, load_profile
from profiles.devices import DeviceFile

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

SEEN_OF_NOMINAL = 0.99
"""GiB that programs see, over the GB in a device's name: 79.15 of 80, 139.8 of 141, 178.35 of
180."""

SAME_MEMORY = 0.15
"""Differences up to this are of rounding and of units, not of another device."""

LARGEST_GB = 2000
"""Memory of a device above this is in MiB."""

MOST_JOBS = 1_000_000
"""Jobs of a step of all ranks, forwards alone, up to which a row's table is played."""

_BETWEEN_NODES = re.compile(r"(\d+(?:\.\d+)?)\s*Gb(?:ps|/s)?\s*(?:node-node|between nodes)", re.I)


def estimate_file(source: Path, target: Path) -> tuple[int, int]:
    """Predict every row of a CSV file into another; return (rows, rows predicted)."""
    rows = list(estimate_rows(read_rows(source)))
    write_rows(target, rows, list(rows[0]) if rows else PREDICTED)
    return len(rows), sum(not row["reason"] for row in rows)


def estimate_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each row with its prediction, or with the reason there is none."""
    prices = RowPrices()
    for row in rows:
        predicted = dict.fromkeys(PREDICTED, "")
        try:
            predicted |= predict_row(row, prices)
        except PlannerError as error:
            predicted["reason"] = str(error)
        except (ArithmeticError, ValueError) as error:
            # One row of numbers that no run has must not cost the others.
            predicted["reason"] = f"its numbers cannot be priced ({error})"
        yield {**row, **predicted}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRow:
    """A row with what was made of it."""

    run: RunRow
    """The run that it describes."""
    profile: Profile
    """The machine that it is priced on."""
    rates: DeviceRates
    """What its device sustains, as it was priced."""
    estimate: Estimate
    """The run's step."""
    predicted: dict[str, Any]
    """Its predicted columns."""


def predict_row(row: Mapping[str, Any], prices: RowPrices | None = None) -> dict[str, Any]:
    """Return the predicted columns of one row; raise PlannerError when it can't be priced.

    `prices` keeps what rows share.
    """
    return price_row(row, prices).predicted


def price_row(
    row: Mapping[str, Any], prices: RowPrices | None = None, machine: Profile | None = None
) -> PricedRow:
    """Return a row priced; raise PlannerError when it can't be. `prices` keeps what rows share;
    `machine` as in `run_of`.
    """
    prices = prices or RowPrices()
    run, profile, rates = run_of(row, prices, machine)
    found = prices.estimate(run, profile, rates)
    room = device_bytes(row, profile)
    fits = "nearly full" if is_nearly_full(found, run, room) else "yes"
    if needed_bytes(found) > room:
        fits = _remedy(row, run, profile, rates, prices)
    step_s = found.step_s + retry_seconds(found, run, room)
    samples_per_gpu_s = run.global_batch / step_s / run.gpus
    predicted = {
        "predicted_step_time_s": step_s,
        "predicted_tflops_per_gpu": samples_per_gpu_s * ModelCounts(run.sizes).model_flop() / TFLOP,
        "predicted_tokens_per_s_per_gpu": samples_per_gpu_s * run.sizes.seq_len,
        "predicted_peak_mem_gib": max(float(parts.tensor_bytes) for parts in found.memory) / GIB,
        "predicted_fits": fits,
        "assumed": "; ".join(run.assumed),
    }
    return PricedRow(run=run, profile=profile, rates=rates, estimate=found, predicted=predicted)


def run_of(
    row: Mapping[str, Any], prices: RowPrices | None = None, machine: Profile | None = None
) -> tuple[RunRow, Profile, DeviceRates]:
    """Return the run a row describes, and the machine it is priced on: a profile of the row's
    device where one is given, with what logs of the row's runtime taught it.

    Products in a dtype the device does not have are priced in the next wider one. A microbatch that
    the row leaves open is halved until it fits; `prices` keeps what rows share.
    """
    run = parse_row(row)
    if run.num_microbatches * run.pp * run.vpp > MOST_JOBS:
        raise RowError(
            f"a rank runs {run.num_microbatches} microbatches a step; give a larger micro_batch or "
            "a smaller global_batch"
        )
    profile, rates, assumed = machine_of(row, machine)
    rates = rates.slowed(profile.factors_of(run.stack.name))
    if run.dtype not in rates.peak_flop_per_s:
        wider = next(name for name in WIDER if name in rates.peak_flop_per_s)
        assumed = (*assumed, f"dtype={wider}: {profile.cluster.device} has no {run.dtype}")
        run = replace(run, dtype=wider)
    prices, limit = prices or RowPrices(), device_bytes(row, profile)
    sizes = [run]
    while run.assumed_to_be("micro_batch") and sizes[-1].micro_batch > 1:
        # Halved and rounded up, down to a single sample.
        sizes.append(sizes[-1].assuming(micro_batch=-(-sizes[-1].micro_batch // 2)))
    if len(sizes) > 1:
        fitting = (s for s in sizes if prices.estimate(s, profile, rates).peak_bytes <= limit)
        run = next(fitting, run)
    return replace(run, assumed=(*run.assumed, *assumed)), profile, rates


def _remedy(
    row: Mapping[str, Any], run: RunRow, profile: Profile, rates: DeviceRates, prices: RowPrices
) -> str:
    """Return whether a run that does not fit does so with full recompute, if its row leaves that
    open.
    """
    if str(row.get("recompute") or "").strip():
        return "no"
    again = replace(run, recompute="full")
    fits = prices.estimate(again, profile, rates).peak_bytes <= device_bytes(row, profile)
    return "yes, with full recompute" if fits else "no"


def device_bytes(row: Mapping[str, Any], profile: Profile) -> float:
    """Memory of the row's device: of its profile or data sheet, else as the row says."""
    device = device_of(str(row.get("gpu") or ""), _memory_gb(row))
    seen = SEEN_OF_NOMINAL * GIB
    own = profile.memory_bytes if device.memory_gb is None else device.memory_gb * seen
    stated = (_memory_gb(row) or 0) * seen
    return stated if stated and abs(stated / own - 1) > SAME_MEMORY else own


def machine_of(
    row: Mapping[str, Any], machine: Profile | None = None
) -> tuple[Profile, DeviceRates, tuple[str, ...]]:
    """Return the profile and rates of a row's GPU, and what was assumed of its network.

    A rate between nodes printed in the notes (``800 Gb/s between nodes``) picks the link, where no
    `machine`, a profile of the same device, says it. Raises PlannerError for one of another.
    """
    assumed = []
    device = device_of(str(row.get("gpu") or ""), _memory_gb(row))
    if is_scaled(device):
        assumed.append(f"rates={device.reference} scaled to {device.name}")
    if machine is not None:
        if machine.name.partition("@")[0] != device.reference or machine.source != "shipped":
            raise PlannerError(
                f"`profile` {machine.name} was given, and runs on {device.name} are priced with "
                f"the training rates of {device.reference}; give that profile, or one calibrated "
                "from it"
            )
        return (*_on_device(machine, device), tuple(assumed))
    printed = _BETWEEN_NODES.search(str(row.get("notes") or ""))
    rate = float(printed[1]) / 8 if printed else 0.0
    link = _nearest_link(device.reference, rate) if rate else ""
    profile, rates = _machine(f"{device.reference}@{link}" if link else device.reference, device)
    if not rate:
        assumed.append(f"network={profile.cluster.inter_node.name}")
    return profile, rates, tuple(assumed)


def _memory_gb(row: Mapping[str, Any]) -> float | None:
    """The GB a row states of its device, also as ``80GB`` or in MiB; None for other words."""
    number = real(re.sub(r"(?i)\s*(gi?b?|mi?b?)$", "", str(row.get("gpu_mem_gb") or "")))
    if number is None or number <= 0:
        return None
    return number / 1024 if number > LARGEST_GB else number


@lru_cache(maxsize=64)
def _machine(name: str, device: DeviceFile) -> tuple[Profile, DeviceRates]:
    return _on_device(load_profile(name), device)


def _on_device(profile: Profile, device: DeviceFile) -> tuple[Profile, DeviceRates]:
    if device.devices_per_node is not None:
        cluster = profile.file.cluster.model_copy(
            update={"devices_per_node": device.devices_per_node}
        )
        profile = Profile(profile.file.model_copy(update={"cluster": cluster}))
    link = 1 / profile.cluster.intra_node.beta_s_per_byte
    return profile, scaled_rates(device, load_rates(profile), reference_link_bytes_per_s=link)


@lru_cache(maxsize=64)
def _nearest_link(name: str, gigabit_per_s: float) -> str:
    """The shipped link variant nearest to a rate per GPU; empty for the default one."""
    record = load_profile(name).file.cluster
    links = {"": record.inter_node, **record.other_inter_node}
    return min(links, key=lambda k: abs(8e-9 / links[k].beta_s_per_byte.value / gigabit_per_s - 1))
