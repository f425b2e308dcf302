"""The hosts that devices come in: what offload uses, from data sheets; nothing is measured here.

Peak rates of memory are (sockets) x (channels) x (transfers per second) x 8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

REACHED_FRACTION = 0.5
"""Of peak memory rate, by an optimizer's step over all cores. Assumed; a measured profile has
no probe for it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The host of one node: its memory, the rate of that (peak), and one device's link to it,
    one way. `source` says where the figures are from.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str


_DGX_A100 = HostSpec(
    memory_bytes=2e12,
    memory_bytes_per_s=2 * 8 * 3.2e9 * 8,
    link_bytes_per_s=25e9,
    source="DGX A100 640GB data sheet (two EPYC 7742, 2 TB) and AMD's (8 channels of DDR4-3200); "
    "of PCIe 4 x16's 32 GB/s, 25 assumed to be reached",
)
_DGX_H100 = HostSpec(
    memory_bytes=2e12,
    memory_bytes_per_s=2 * 8 * 4.8e9 * 8,
    link_bytes_per_s=50e9,
    source="DGX H100/H200 in NVIDIA's DGX BasePOD architecture (two Xeon 8480C, 2 TB) and Intel's "
    "data sheet (8 channels of DDR5-4800); of PCIe 5 x16's 64 GB/s, 50 assumed to be reached",
)
_DGX_B200 = HostSpec(
    memory_bytes=2e12,
    memory_bytes_per_s=2 * 8 * 5.6e9 * 8,
    link_bytes_per_s=50e9,
    source="DGX B200 data sheet (two Xeon 8570, 2 TB) and Intel's (8 channels of DDR5-5600); of "
    "PCIe 5 x16's 64 GB/s, 50 assumed to be reached",
)

HOSTS = {
    "NVIDIA A100 80GB PCIe": _DGX_A100,
    "NVIDIA A100-SXM4-80GB": _DGX_A100,
    "NVIDIA H100 80GB HBM3": _DGX_H100,
    "NVIDIA H200": _DGX_H100,
    "NVIDIA B200": _DGX_B200,
}
"""By device, the host of the vendor's own system with it."""

ASSUMED = HostSpec(
    memory_bytes=1e12,
    memory_bytes_per_s=2 * 8 * 3.2e9 * 8,
    link_bytes_per_s=25e9,
    source="assumed: two sockets of 8 channels of DDR4-3200, 1 TB, PCIe 4 x16",
)
"""For any other device."""
