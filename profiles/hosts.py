"""The host of a node: what offload uses, from data sheets; nothing is measured here.

Those of the vendors' own systems are in `profiles/data/clusters`. Peak rates of memory are
(sockets) x (channels) x (transfers per second) x 8 bytes.
"""

from __future__ import annotations

from profiles.records import Record

REACHED_FRACTION = 0.5
"""Of peak memory rate, by an optimizer's step over all cores. Assumed; a measured profile has
no probe for it yet."""


class HostSpec(Record):
    """The host of one node: its memory, the rate of that (peak), and one device's link to it,
    one way. `source` says where the figures are from.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str


ASSUMED = HostSpec(
    memory_bytes=1e12,
    memory_bytes_per_s=2 * 8 * 3.2e9 * 8,
    link_bytes_per_s=25e9,
    source="assumed: two sockets of 8 channels of DDR4-3200, 1 TB, PCIe 4 x16",
)
"""Of a device whose host is not known."""
