"""Rows in, predictions out. Files of rows: `row_files`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from costmodel.table.kernels import DeviceRates
from costmodel.table.published import RunRow, estimate_run, estimate_run_memory, parse_row
from costmodel.table.rates import load_rates
from costmodel.table.rows.devices import device_of, is_scaled, scaled_rates
from costmodel.table.rows.row_cells import real
from costmodel.table.rows.row_plan import RowPrices
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

_BETWEEN_NODES = re.compile(r"(\d+(?:\.\d+)?)\s*Gb(?:ps|/s)?\s*(?:node-node|between nodes)", re.I)


def estimate_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each row with its prediction, or with the reason there is none."""
    for row in rows:
        predicted = dict.fromkeys(PREDICTED, "")
        try:
            predicted |= predict_row(row)
        except PlannerError as error:
            predicted["reason"] = str(error)
        except (ArithmeticError, ValueError) as error:
            # One row of numbers that no run has must not cost the others.
            predicted["reason"] = f"its numbers cannot be priced ({error})"
        yield {**row, **predicted}


def predict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicted columns of one row; raise PlannerError when it can't be priced."""
    run, profile, rates = run_of(row)
    if run.lora_rank:
        # The closed forms train all weights.
        found = RowPrices().estimate(run, profile, rates)
        step_s, peak_bytes = found.step_s, max(float(m.tensor_bytes) for m in found.memory)
        fits = "yes" if peak_bytes <= _room(row, profile) else "no"
    else:
        step_s = estimate_run(run, profile, rates).step_s
        peak_bytes, fits = estimate_run_memory(run).total, _fits(row, run, profile)
    samples_per_gpu_s = run.global_batch / step_s / run.gpus
    return {
        "predicted_step_time_s": step_s,
        "predicted_tflops_per_gpu": samples_per_gpu_s * run.shape.model_flop() / TFLOP,
        "predicted_tokens_per_s_per_gpu": samples_per_gpu_s * run.shape.seq_len,
        "predicted_peak_mem_gib": peak_bytes / GIB,
        "predicted_fits": fits,
        "assumed": "; ".join(run.assumed),
    }


def run_of(row: Mapping[str, Any]) -> tuple[RunRow, Profile, DeviceRates]:
    """Return the run a row describes, and the machine it is priced on.

    Products in a dtype the device does not have are priced in the next wider one.
    """
    run = parse_row(row)
    profile, rates, assumed = machine_of(row)
    run = _made_to_fit(run, _room(row, profile))
    assumed = (*run.assumed, *assumed)
    if run.dtype not in rates.peak_flop_per_s:
        wider = next(name for name in WIDER if name in rates.peak_flop_per_s)
        assumed = (*assumed, f"dtype={wider}: {profile.cluster.device} has no {run.dtype}")
        run = replace(run, dtype=wider)
    return replace(run, assumed=assumed), profile, rates


def _fits(row: Mapping[str, Any], run: RunRow, profile: Profile) -> str:
    """Return whether a run fits, or what it needs for that of what its row leaves open."""
    room = _room(row, profile)

    def fits(variant: RunRow) -> bool:
        return estimate_run_memory(variant).total <= room

    if fits(run):
        return "yes"
    lean = replace(run.stack, gradient_bytes=run.stack.reduced_bytes)
    small = [(run, "")]
    if lean != run.stack:
        small.append((replace(run, stack=lean), "16-bit gradients"))
    if not str(row.get("recompute") or "").strip():
        again = [(replace(variant, recompute="full"), name) for variant, name in small]
        small += [(variant, f"{name} and full recompute") for variant, name in again]
    for variant, name in small:
        if fits(variant):
            return f"yes, with {name.removeprefix(' and ')}"
    return "no"


def _room(row: Mapping[str, Any], profile: Profile) -> float:
    """Bytes of tensors that the row's device has room for."""
    room = device_bytes(row, profile) - profile.context_bytes
    return room / (1 + profile.allocator_overhead_fraction)


def _made_to_fit(run: RunRow, room: float) -> RunRow:
    """Return a run with the largest microbatch of halves that fits, where its row left that open;
    as it is where none does.
    """
    tried = run
    while estimate_run_memory(tried).total > room:
        if not tried.assumed_to_be("micro_batch") or tried.micro_batch == 1:
            return run
        tried = tried.assuming(micro_batch=-(-tried.micro_batch // 2))
    return tried


def device_bytes(row: Mapping[str, Any], profile: Profile) -> float:
    """Memory of the row's device: of its profile or data sheet, else as the row says."""
    device = device_of(str(row.get("gpu") or ""), _memory_gb(row))
    seen = SEEN_OF_NOMINAL * GIB
    own = profile.memory_bytes if device.memory_gb is None else device.memory_gb * seen
    stated = (_memory_gb(row) or 0) * seen
    return stated if stated and abs(stated / own - 1) > SAME_MEMORY else own


def machine_of(row: Mapping[str, Any]) -> tuple[Profile, DeviceRates, tuple[str, ...]]:
    """Return the profile and rates of a row's GPU, and what was assumed of its network.

    A rate between nodes printed in the notes (``800 Gb/s between nodes``) picks the link.
    """
    assumed = []
    device = device_of(str(row.get("gpu") or ""), _memory_gb(row))
    if is_scaled(device):
        assumed.append(f"rates={device.reference} scaled to {device.name}")
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
    profile = load_profile(name)
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
