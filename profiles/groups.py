"""Clusters of several groups of devices: kinds that differ, or equal ones at different places.

Each group is a cluster of equal devices with a profile of its own. What leaves a group takes one
link, the outermost tier of every group's cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices of one kind, in nodes of equal size.

    `profile` is that of the group's devices and links, up to what leaves the group.
    """

    name: str
    profile: Profile
    num_devices: int


class GroupedProfile(Profile):
    """A cluster of several groups; asked as one machine, it answers as its first group."""

    def __init__(self, name: str, groups: Sequence[DeviceGroup]) -> None:
        first = groups[0].profile
        super().__init__(first.file, first.ops, first.collectives)
        self.groups = tuple(groups)
        self._name = name

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self._name
