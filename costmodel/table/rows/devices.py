"""GPU names as rows write them, and the rates of devices that no profile is of.

A device that differs from a profiled one in memory, links or clocks is priced with the rates of
that one, its reference device, scaled by its own data sheet (`profiles/data/devices`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from costmodel.table.kernels import FOUR_BITS, DeviceRates
from planner.errors import PlannerError
from planner.units import GB, TB, TFLOP
from profiles.devices import DeviceFile, device_file, device_names, named_device


def device_of(gpu: str, memory_gb: float | None = None) -> DeviceFile:
    """Return the device a row names; `memory_gb` tells sizes of the same name apart.

    Raises PlannerError when no device has that name.
    """
    if not gpu.strip():
        raise PlannerError(
            "column gpu is blank; an estimate needs it, so name the device of the run"
        )
    squashed = re.sub(r"[^A-Z0-9]", "", gpu.upper())
    if memory_gb is not None and f"{memory_gb:.0f}G" not in squashed:
        squashed += f"{memory_gb:.0f}GB"
    device = named_device(squashed)
    if device is None:
        known = ", ".join(device_file(name).name for name in device_names())
        raise PlannerError(f"gpu {gpu!r} is not one we have data for; known: {known}")
    return device


def is_scaled(device: DeviceFile) -> bool:
    """Whether a device's rates are its reference device's, scaled by its data sheet."""
    sheet = (device.tflop_per_s, device.memory_tb_per_s, device.link_gb_per_s)
    return any(figure is not None for figure in sheet)


def scaled_rates(
    device: DeviceFile, rates: DeviceRates, *, reference_link_bytes_per_s: float
) -> DeviceRates:
    """Return the rates of a device's reference device as they hold for the device."""
    scale, link = 1.0, 1.0
    if device.tflop_per_s is not None:
        # Peaks of all dtypes keep their ratios; the data sheet's bf16 peak tells the rest.
        scale = device.tflop_per_s * TFLOP / rates.peak_flop_per_s["bfloat16"]
    if device.link_gb_per_s is not None:
        link = device.link_gb_per_s * GB / reference_link_bytes_per_s
    memory = rates.memory_bytes_per_s
    if device.memory_tb_per_s is not None:
        memory = device.memory_tb_per_s * TB
    peaks = {dtype: scale * peak for dtype, peak in rates.peak_flop_per_s.items()}
    if device.float8_tflop_per_s is not None:
        narrow = device.float8_tflop_per_s * TFLOP
        peaks |= {dtype: narrow for dtype in peaks if dtype.startswith("float8")}
    of_reference = device_file(device.reference).float4_per_float8
    if float4_per_float8 := device.float4_per_float8 or of_reference:
        peaks[FOUR_BITS] = float4_per_float8 * peaks["float8_e4m3fn"]
    return replace(
        rates,
        peak_flop_per_s=peaks,
        memory_bytes_per_s=memory,
        num_multiprocessors=device.num_multiprocessors or rates.num_multiprocessors,
        link_scale=link,
        host_scale=device.host_scale,
    )
