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
class Tier:
    """A level of the network beyond a node's own links: sockets, rails, a spine, other sites.

    `link` is what one device has of the links that leave a domain of `devices` neighbouring ranks,
    while all devices of the domain send: messages that stay in a domain do not take it.
    """

    devices: int
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices: links inside them, links between them, and what lies further out.

    `peak_flop_per_s` pairs dtype names with dense peak rates; `memory_bytes` is what one
    device has in all; `max_devices` bounds what the description speaks for (None: any). `tiers`
    come beside the two links of nodes, the smallest domains first; one of fewer
    than `devices_per_node` devices is inside nodes, one of as many is instead of `inter_node`.
    `stage_ranks` is set where a plan has a part of every stage here: so many of its ranks lie on
    these devices, the others on other groups (0: all lie here).
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
    tiers: tuple[Tier, ...] = ()
    stage_ranks: int = 0

    def __post_init__(self) -> None:
        """Raise ProfileError when a figure is not positive."""
        for label, value in (
            ("devices_per_node", self.devices_per_node),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
        ):
            if value <= 0:
                raise ProfileError(
                    f"{label}={value} of cluster {self.name!r} was given; use a figure above 0"
                )
        sizes = [tier.devices for tier in self.tiers]
        if sizes != sorted(set(sizes)) or sizes[:1] == [0]:
            raise ProfileError(
                f"tiers of cluster {self.name!r} have domains of {sizes} devices; list each once, "
                "the smallest first"
            )

    def spans_nodes(self, group_size: int, stride: int = 1) -> bool:
        """Whether ranks 0, stride, … of a group lie on more than one node."""
        return (group_size - 1) * stride >= self.devices_per_node
