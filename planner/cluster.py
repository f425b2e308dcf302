"""What the machines are and how they are linked; torch-free data."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link level. A message of n bytes costs `alpha_s + n * beta_s_per_byte`."""

    name: str
    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A homogeneous cluster: nodes of equal devices, one link level inside, one between.

    `peak_flop_per_s` pairs dtype names with dense peak rates; `memory_bytes` is what one
    device has in all; `max_devices` bounds what the description speaks for (None: any).
    """

    name: str
    device: str
    device_type: str
    devices_per_node: int
    max_devices: int | None
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: tuple[tuple[str, float], ...]
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        """Raise ProfileError when a figure is not positive."""
        for label, value in (
            ("devices_per_node", self.devices_per_node),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
        ):
            if value <= 0:
                raise ProfileError(f"{label}={value} of cluster {self.name!r} must be positive")

    def spans_nodes(self, group_size: int, stride: int = 1) -> bool:
        """Whether ranks 0, stride, … of a group lie on more than one node."""
        return (group_size - 1) * stride >= self.devices_per_node
