"""Seconds of GPU kernels from a few physical parameters of a device, fused or eager.

Our own runtime is priced op by op from a profile's lookups. Other runtimes' kernels are matrix
products, attention and passes over memory, priced with `DeviceRates`: the data sheet's peaks times
a few fitted efficiencies that all runs of a device share, from its file in `profiles/data/devices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, inf
from typing import Any

from planner.errors import ProfileError
from profiles import Profile
from profiles.devices import TrainingRates, device_file, device_names

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Output tiles of the matrix-product kernels that libraries choose from."""

LARGEST_INTENSITY = 256 * 128 / (256 + 128)
TILE_LOSS = 12.0
"""Multiply-adds per element loaded at which loading costs as much as computing: 128x128
tiles run at 0.95 and 64x64 tiles at 0.83 of the rate of the largest."""


FOUR_BITS = "float4_e2m1fn_x2"
ELEMENT_BYTES = {FOUR_BITS: 0.5, "float8_e4m3fn": 1, "float8_e5m2": 1, "float32": 4}
"""Bytes of an operand's element, where they are not two."""


@lru_cache(maxsize=1 << 16)
def padded_outputs(m: int, n: int, batch: int, num_multiprocessors: int) -> float:
    """Return outputs that (m, n) products pay for, in units of the largest tile's.

    Whole tiles are computed by whole waves of multiprocessors; smaller tiles read more operand
    bytes for each product. The kernel with the least waste is taken.
    """

    def paid(tile_m: int, tile_n: int) -> float:
        # Quantization: a tile at the edge and a last wave take as long as full ones.
        tiles = batch * ceil(m / tile_m) * ceil(n / tile_n)
        waves = ceil(tiles / num_multiprocessors)
        # Elements loaded per multiply-add: each step of k loads tile_m + tile_n and multiplies
        # tile_m * tile_n.
        loss = 1.0 + TILE_LOSS * (tile_m + tile_n) / (tile_m * tile_n)
        return waves * num_multiprocessors * tile_m * tile_n * loss

    return min(paid(*tile) for tile in TILES) / (1.0 + TILE_LOSS / LARGEST_INTENSITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a device sustains inside a training step.

    Peaks and counts are of the data sheet, and `link_scale`, the device's links over those that
    the profile's collectives were measured on. `host_scale` is how long the device's host takes
    for an op, over the host of the runs that the rates were fitted to. The rest is fitted:

    - `matmul_efficiency`: part of the peak that a large product reaches;
    - `matmul_half_k`: the inner length k at which a product takes twice as long for its size;
    - `memory_efficiency`: part of the bandwidth that passes over memory reach;
    - `attention_efficiency`: part of the products' rate that the vendor's fused attention
      reaches, and `portable_attention_efficiency` that made for any device;
    - `low_precision_efficiency`: part of the products' efficiency left in eight bits;
    - `misaligned_efficiency`: part left where rows do not start on 16-byte boundaries, which
      the kernels with vector loads need;
    - `kernel_s`: least time of a kernel;
    - `host_op_s`: time an eager Python framework needs to issue an op, and
      `host_backward_op_s` its autograd engine;
    - `launch_wait_s`: until a host that waits for the end of each kernel goes on;
    - `skew_s`: what two ranks wait for each other at a collective that nothing overlaps, and
      again for each doubling of their number;
    - `node_spread`: part of the work that is waited for the slowest of two nodes, and again for
      each doubling of their number, as no two keep the same clocks;
    - `exposed_part`: part of a collective that work running beside it does not hide, as both
      slow each other, and its start and its end wait;
    - `link_efficiency`, `network_efficiency`: parts of the measured collective rates, inside
      and between nodes, that are reached while the device computes.
    """

    peak_flop_per_s: dict[str, float]
    memory_bytes_per_s: float
    num_multiprocessors: int
    matmul_efficiency: float
    matmul_half_k: float
    memory_efficiency: float
    attention_efficiency: float
    portable_attention_efficiency: float
    kernel_s: float
    host_op_s: float
    host_backward_op_s: float
    launch_wait_s: float
    skew_s: float
    node_spread: float
    exposed_part: float
    link_efficiency: float
    network_efficiency: float
    low_precision_efficiency: float
    misaligned_efficiency: float
    link_scale: float = 1.0
    host_scale: float = 1.0

    @property
    def issue_s(self) -> float:
        """Seconds in which the device's host issues an op of a forward."""
        return self.host_op_s * self.host_scale

    @property
    def issue_back_s(self) -> float:
        """Seconds in which it issues an op of a backward."""
        return self.host_backward_op_s * self.host_scale

    def matmul_seconds(
        self, m: int, n: int, k: int, *, dtype: str, batch: int = 1, aligned: bool = True
    ) -> float:
        """Return seconds of `batch` products of (m, k) and (k, n) in one kernel.

        A tile starts and ends with steps that do not multiply, which a long k makes up for.
        """
        rate = self.peak_flop_per_s[dtype] * self.matmul_efficiency
        if not aligned:
            rate *= self.misaligned_efficiency
        if dtype.startswith("float8"):
            rate *= self.low_precision_efficiency
        padded = padded_outputs(m, n, batch, self.num_multiprocessors)
        ramp = 1.0 + self.matmul_half_k / k
        element = ELEMENT_BYTES.get(dtype, 2)
        moved = batch * element * (m * k + k * n + m * n)
        # Roofline: the slower of arithmetic (2 flop a multiply-add) and memory.
        return max(2.0 * padded * k / rate * ramp, moved / self._memory_rate()) + self.kernel_s

    def attention_seconds(self, flop: float, *, vendor: bool) -> float:
        """Return seconds of a fused attention kernel that does this much work."""
        part = self.attention_efficiency if vendor else self.portable_attention_efficiency
        rate = self.peak_flop_per_s["bfloat16"] * self.matmul_efficiency
        return flop / (rate * part) + self.kernel_s

    def pass_seconds(self, num_bytes: float, kernels: int = 1) -> float:
        """Return seconds of kernels that only move bytes."""
        return num_bytes / self._memory_rate() + kernels * self.kernel_s

    def exposed_seconds(self, seconds: float, *, behind_s: float) -> float:
        """Return what shows of a collective that runs beside `behind_s` of work."""
        # Long compute hides all but what the two slow each other; short compute leaves the rest
        # bare.
        return max(self.exposed_part * seconds, seconds - behind_s)

    def _memory_rate(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    def slowed(self, factors: Mapping[str, float]) -> DeviceRates:
        """Return the rates where each kind of work takes so many times as long, by `TERMS`."""
        changed: dict[str, Any] = {}
        for term, factor in factors.items():
            for rate in SECONDS_OF.get(term, ()):
                changed[rate] = getattr(self, rate) * factor
            for rate in PARTS_OF.get(term, ()):
                # No product and no pass beats the data sheet's peak.
                most = inf if rate in LINK_PARTS else 1.0
                changed[rate] = min(most, getattr(self, rate) / factor)
        return replace(self, **changed) if changed else self


KERNELS, LINKS, NETWORK, HOST, WAITS = "kernels", "links", "network", "host", "waits"
TERMS = (KERNELS, LINKS, NETWORK, HOST, WAITS)
"""Kinds of work that a run of another stack can tell apart: on the device, collectives inside nodes
and between them, the host's issuing of ops, and ranks and nodes that wait for each other."""

SECONDS_OF: dict[str, tuple[str, ...]] = {
    KERNELS: ("kernel_s",),
    HOST: ("host_op_s", "host_backward_op_s", "launch_wait_s"),
    WAITS: ("skew_s", "node_spread"),
}
"""Rates that grow with the time of a kind of work."""

LINK_PARTS = ("link_efficiency", "network_efficiency")
PARTS_OF: dict[str, tuple[str, ...]] = {
    KERNELS: ("matmul_efficiency", "memory_efficiency"),
    LINKS: LINK_PARTS[:1],
    NETWORK: LINK_PARTS[1:],
}
"""Parts of a peak or of a measured rate, which shrink with it. Attention's is a part of that of
products."""

OF_THE_SHEET = (
    "peak_flop_per_s",
    "memory_bytes_per_s",
    "num_multiprocessors",
    "link_scale",
    "host_scale",
)
FITTED = tuple(f.name for f in fields(DeviceRates) if f.name not in OF_THE_SHEET)
"""Names of the fitted parameters: the same few for every run of a device."""


def has_rates(profile: Profile) -> bool:
    """Whether published runs told the rates of a profile's device, or of the one it names."""
    return _record(profile) is not None


def load_rates(profile: Profile) -> DeviceRates:
    """Return the rates a published run on this machine is priced with.

    Raises ProfileError when the profile's device has none, or some are missing.
    """
    record = _record(profile)
    if record is None:
        raise ProfileError(
            f"profile {profile.name} has no training rates; estimate rows of devices that do"
        )
    missing = [rate for rate in FITTED if rate not in record.rates]
    if missing:
        raise ProfileError(
            f"the training rates of {profile.name} lack {', '.join(missing)}; restore its file"
        )
    cluster = profile.cluster
    return DeviceRates(
        peak_flop_per_s=dict(cluster.peak_flop_per_s),
        memory_bytes_per_s=cluster.memory_bytes_per_s,
        num_multiprocessors=int(record.num_multiprocessors.value),
        **{rate: record.rates[rate].value for rate in FITTED},
    )


def residuals_of(profile: Profile) -> dict[str, float]:
    """Return the mean absolute relative error that the rates leave, by source of the runs.

    Empty where no published run is of the profile's device.
    """
    record = _record(profile)
    return {} if record is None else dict(record.residuals)


def _record(profile: Profile) -> TrainingRates | None:
    """Return a shipped profile's rates, or those of the device it names for them."""
    name = profile.name.partition("@")[0]
    device = device_file(name).shipped if name in device_names() else None
    if device is not None and device.training_of is not None:
        device = device_file(device.training_of).shipped
    return None if device is None else device.training
