"""A shipped profile as its devices are in the middle of a training step.

Published tables of single operators and collectives tell what each reaches alone, on one node.
Whole training runs tell what is left of that beside everything else, and the rates fitted to
them (`kernels.DeviceRates`) are physical, so a captured graph is priced with them too:

    op             seconds * (1 + node_spread * log2(nodes))     never under flop / sustained rate
    collective     seconds / (link_efficiency inside a node, network_efficiency between nodes)
    hidden message max(exposed_part * seconds, seconds - compute beside it)

A profile measured on the user's own machine has what it saw in it, and is left as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, log2
from typing import Literal

from costmodel.table.kernels import DeviceRates
from costmodel.table.rates import has_rates, load_rates
from profiles import Group, Lookup, OpQuery, Profile
from profiles.calibration import op_term
from profiles.lookup.families import MATMUL, family_of, pace_kind


class TrainingProfile(Profile):
    """A profile whose answers are those of a step on so many nodes."""

    def __init__(self, profile: Profile, rates: DeviceRates, num_nodes: int) -> None:
        super().__init__(profile.file, profile.ops, profile.collectives)
        self.alone = profile
        self.factors = profile.factors
        self.rates = rates
        self.num_nodes = num_nodes
        self.waited = 1.0 + rates.node_spread * log2(num_nodes)
        self._op_answers: dict[OpQuery, Lookup] = {}
        self._collective_answers: dict[tuple[str, float, Group], Lookup] = {}

    def op_seconds(self, query: OpQuery) -> Lookup:
        """Return an operator's time on the slowest of all nodes, at the clocks they sustain."""
        answer = self._op_answers.get(query)
        if answer is None:
            answer = self._op_answers[query] = self._op_seconds(query)
        return answer

    def _op_seconds(self, query: OpQuery) -> Lookup:
        answer = self.alone.op_seconds(query)
        peak = self.rates.peak_flop_per_s.get(query.dtype)
        if peak is not None and answer.source != "measured" and family_of(query.target) == MATMUL:
            # What runs showed of a device is beyond the rate of the fit as well.
            factor = self.factors[op_term(pace_kind(query.target), query.direction)]
            least_s = factor * query.flop / (peak * self.rates.matmul_efficiency)
            if answer.seconds < least_s:
                answer = replace(answer, seconds=least_s)
        return answer.times(self.waited)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective beside compute."""
        key = kind, num_bytes, group
        if key not in self._collective_answers:
            answer = self.alone.collective_seconds(kind, num_bytes, group)
            in_step = replace(answer, seconds=answer.seconds / self._reached_part(group))
            self._collective_answers[key] = in_step
        return self._collective_answers[key]

    def least_collective_s_per_byte(self, kind: str, group: Group, *, most_bytes: float) -> float:
        """Return seconds per byte that no collective of up to `most_bytes` goes below."""
        least = self.alone.least_collective_s_per_byte(kind, group, most_bytes=most_bytes)
        return least / self._reached_part(group)

    def _reached_part(self, group: Group) -> float:
        """Return what part of its links' rate a group reaches."""
        inside = group.num_nodes == 1
        return self.rates.link_efficiency if inside else self.rates.network_efficiency

    def overlap_slowdown(self, part: Literal["compute", "communication"]) -> float:
        """Return by how much a part slows while both run together.

        A message of t seconds that costs the compute beside it exposed_part * t slows it by
        1 / (1 - exposed_part) while it lasts.
        """
        if self.file.overlap_slowdown:
            return super().overlap_slowdown(part)
        return 1.0 / (1.0 - self.rates.exposed_part) if part == "compute" else 1.0


def in_training(profile: Profile, num_devices: int) -> Profile:
    """Return what a shipped profile answers inside steps on so many devices.

    Itself where it is measured, is in training already, or no published runs of its device tell.
    """
    return _in_training(profile, ceil(num_devices / profile.cluster.devices_per_node))


@lru_cache(maxsize=32)
def _in_training(profile: Profile, num_nodes: int) -> Profile:
    if type(profile) is Profile and profile.source == "shipped" and has_rates(profile):
        return TrainingProfile(profile, load_rates(profile), num_nodes)
    return profile
