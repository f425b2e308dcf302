"""A machine simple enough to check by hand: flat rates, alpha-beta collectives.

Stands in for a `Profile` where a test wants to know every number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.cluster import ClusterSpec, Link, Tier
from planner.units import GIB
from profiles import Group, Lookup, OpQuery
from profiles.hosts import HostSpec
from profiles.lookup.tiers import two_levels
from profiles.profile import DeviceGroup


@dataclass(frozen=True)
class Machine:
    """Flop and bytes at flat rates; a ring collective moves bytes * (n-1)/n per pass."""

    flop_per_s: float = 400e12
    bytes_per_s: float = 2e12
    intra_bytes_per_s: float = 300e9
    inter_bytes_per_s: float = 40e9
    alpha_s: float = 5e-6
    devices_per_node: int = 8
    max_devices: int | None = None
    memory_bytes: float = 80.0 * GIB
    context_bytes: float = 1.0 * GIB
    allocator_overhead_fraction: float = 0.0
    allocator_range: tuple[float, float] = (0.0, 0.0)
    expert_imbalance: float | None = None
    launch_overhead_s: float = 0.0
    name: str = "test-machine"
    source: str = "shipped"
    tiers: tuple[Tier, ...] = ()
    groups: tuple[DeviceGroup, ...] = ()

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec(
            name=self.name,
            device="test",
            device_type="cuda",
            devices_per_node=self.devices_per_node,
            max_devices=self.max_devices,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_s=self.bytes_per_s,
            peak_flop_per_s=(("bfloat16", self.flop_per_s), ("float32", self.flop_per_s)),
            intra_node=Link(
                name="intra", alpha_s=self.alpha_s, beta_s_per_byte=1 / self.intra_bytes_per_s
            ),
            inter_node=Link(
                name="inter", alpha_s=self.alpha_s, beta_s_per_byte=1 / self.inter_bytes_per_s
            ),
            tiers=self.tiers,
        )

    def host_seconds(
        self, direction: str, *, ops: int, products: int = 0, redistributions: int = 0
    ) -> float:
        return ops * self.launch_overhead_s

    def op_seconds(self, query: OpQuery) -> Lookup:
        seconds = max(query.flop / self.flop_per_s, query.num_bytes / self.bytes_per_s)
        return Lookup(seconds=seconds, source="test", relative_error=0.0)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        size = group.ranks_per_node * group.num_nodes
        if size == 1:
            return Lookup(seconds=0.0, source="test", relative_error=0.0)
        if group.domains:
            levels = two_levels(kind, group, self.tiers)
            inside = [
                self.collective_seconds(k, num_bytes, levels.inside) for k in levels.inside_kinds
            ]
            seconds = levels.across_s(num_bytes) + sum(answer.seconds for answer in inside)
            return Lookup(seconds=seconds, source="test", relative_error=0.0)
        passes = 2.0 if kind == "all_reduce" else 1.0
        share = 1.0 if kind in ("send_recv", "broadcast") else (size - 1) / size
        rate = self.intra_bytes_per_s if group.num_nodes == 1 else self.inter_bytes_per_s
        seconds = passes * (self.alpha_s + share * num_bytes / rate)
        return Lookup(seconds=seconds, source="test", relative_error=0.0)

    def least_collective_s_per_byte(self, kind: str, group: Group, *, most_bytes: float) -> float:
        return self.collective_seconds(kind, most_bytes, group).seconds / most_bytes

    def overlap_slowdown(self, part: str) -> float:
        return 1.0

    def optimizer_seconds(
        self, *, param_bytes: float, num_tensors: int, sharded: bool = False
    ) -> Lookup:
        return Lookup(seconds=7 * param_bytes / self.bytes_per_s, source="test", relative_error=0.0)

    def step_seconds(
        self, work: str, *, num_bytes: float, num_tensors: int = 1, num_calls: int = 1
    ) -> Lookup:
        if work in ("host_to_device", "device_to_host"):
            seconds = self.alpha_s + num_bytes / self.host.link_bytes_per_s
        else:
            passes = {"accumulate": 3.0, "cast": 1.5}
            seconds = passes.get(work, 0.0) * num_bytes / self.bytes_per_s
        return Lookup(seconds=seconds, source="test", relative_error=0.0)

    def wait_seconds(self, compute_s: Any, num_collectives: Any, *, inside: bool = False) -> Any:
        return 0.0 * num_collectives

    @property
    def host(self) -> HostSpec:
        return HostSpec(
            memory_bytes=4 * self.memory_bytes,
            memory_bytes_per_s=self.bytes_per_s / 20,
            link_bytes_per_s=self.bytes_per_s / 100,
            source="test",
        )

    def host_optimizer_seconds(
        self, *, param_bytes: float, weight_bytes: float, num_tensors: int, sharded: bool = False
    ) -> Lookup:
        return Lookup(
            seconds=9 * param_bytes / self.host.memory_bytes_per_s,
            source="test",
            relative_error=0.0,
        )

    def calibration_of(self, runtime: str) -> None:
        """No log was read."""

    def block_correction(self, direction: str, *, compiled: bool = False) -> float:
        return 1.0


class Overlapping(Machine):
    """A machine on which messages and compute that run together slow each other."""

    def overlap_slowdown(self, part: str) -> float:
        return 1.3 if part == "compute" else 1.1
