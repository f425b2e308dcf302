"""Cluster files: groups of devices and the tiers of links around them, described in TOML.

    name = "two halls"

    [[group]]                       # one or more, of any profiles that a search takes
    profile = "a100-sxm4-80gb"      # a shipped name, or a profile's directory
    nodes = 32

    [[group]]
    name = "new"                    # as plans name it; if not given, the profile's name
    profile = "h100-sxm5-80gb"
    nodes = 4
    devices_per_node = 8            # if not given, the profile's: devices that share fast links
    memory_gib = 60                 # if not given, the profile's: what training may use

    [[tier]]                        # links that messages take which leave a domain of devices
    name = "spine"
    group = "a100-sxm4-80gb"        # whose network it is in; if not given, every group's
    devices = 128                   # of a domain
    gb_per_s = 25                   # of one device and direction, 10^9 bytes
    uplink_gb_per_s = 800           # of all links that leave a domain together, if those are fewer
    latency_us = 12

    [between]                       # what leaves a group; needed with several groups
    gb_per_s = 5
    latency_us = 30

A device's part of an uplink is what it has while all devices of its domain send: groups of ranks
that share a link share its rate.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from planner.errors import ProfileError
from planner.units import GB, GIB
from profiles.catalog import load_profile
from profiles.profile import DeviceGroup, GroupedProfile, Profile
from profiles.records import MOST_DEVICES, Figure, LinkRecord, Record, TierRecord


class _Link(Record):
    """Rate and latency of a link, as a user writes them."""

    name: str = ""
    gb_per_s: float = Field(gt=0)
    uplink_gb_per_s: float | None = Field(default=None, gt=0)
    latency_us: float = Field(gt=0)

    def record(self, name: str, devices: int) -> LinkRecord:
        """Return the link of a device that leaves a domain of so many."""
        bytes_per_s, detail = self.gb_per_s * GB, "cluster file"
        if self.uplink_gb_per_s is not None and self.uplink_gb_per_s * GB / devices < bytes_per_s:
            bytes_per_s = self.uplink_gb_per_s * GB / devices
            detail = f"cluster file: {devices} devices share {self.uplink_gb_per_s:g} GB/s"

        def figure(value: float) -> Figure:
            return Figure(value=value, origin="assumed", detail=detail)

        return LinkRecord(
            name=self.name or name,
            alpha_s=figure(self.latency_us * 1e-6),
            beta_s_per_byte=figure(1 / bytes_per_s),
        )


class _Tier(_Link):
    """A tier of one group's network, or of all."""

    group: str | None = None
    devices: int = Field(ge=1)


class _Group(Record):
    """Nodes of equal devices."""

    name: str = ""
    profile: str
    nodes: int = Field(ge=1)
    devices_per_node: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    memory_gib: float | None = Field(default=None, gt=0)


class _ClusterFile(Record):
    """The whole file."""

    name: str = ""
    group: tuple[_Group, ...] = Field(min_length=1)
    tier: tuple[_Tier, ...] = ()
    between: _Link | None = None


def load_cluster(path: str | os.PathLike[str]) -> Profile:
    """Read a cluster file: a profile whose cluster has its tiers; of several groups, one that has
    a profile for each (`GroupedProfile`).

    A profile's directory is found from the file's folder. Raises ProfileError, in one line, where
    the file is missing or damaged, or its parts do not go together.
    """
    file = _read(Path(path))
    cluster, several = file.name or Path(path).stem, len(file.group) > 1
    names = [group.name or group.profile for group in file.group]
    if len(set(names)) < len(names):
        raise ProfileError(
            f"{path} has several groups called {next(n for n in names if names.count(n) > 1)!r}; "
            "give each a `name` of its own"
        )
    joined = next((name for name in names if "+" in name), None)
    if joined is not None:
        raise ProfileError(
            f"{path} has a group called {joined!r}; plans join names of groups by +, so give it a "
            "`name` without one"
        )
    for tier in file.tier:
        if tier.group is not None and tier.group not in names:
            raise ProfileError(
                f"{path} has a tier of group {tier.group!r}; its groups are {', '.join(names)}"
            )
    if several and file.between is None:
        raise ProfileError(
            f"{path} has {len(names)} groups; say in [between] what links them: gb_per_s and "
            "latency_us"
        )
    groups = []
    for name, group in zip(names, file.group, strict=True):
        tiers = [tier for tier in file.tier if tier.group in (None, name)]
        groups.append(
            _group(
                group,
                tiers,
                name=name if several else cluster,
                between=file.between if several else None,
                folder=Path(path).parent,
            )
        )
    return GroupedProfile(cluster, groups) if several else groups[0].profile


def _group(
    group: _Group, tiers: list[_Tier], *, name: str, between: _Link | None, folder: Path
) -> DeviceGroup:
    """Return a group with its profile, whose cluster has these tiers, and `between` as the last."""
    beside = folder / group.profile
    profile = load_profile(beside if beside.is_dir() else group.profile)
    record = profile.file.cluster
    per_node = group.devices_per_node or record.devices_per_node
    num_devices = per_node * group.nodes
    found = [
        TierRecord(devices=tier.devices, link=tier.record(f"tier of {tier.devices}", tier.devices))
        for tier in sorted(tiers, key=lambda tier: tier.devices)
        # A domain as large as the group has nothing outside it.
        if tier.devices < num_devices
    ]
    if between is not None:
        # What leaves the group leaves a domain of all its devices.
        link = between.record("between groups", num_devices)
        found.append(TierRecord(devices=num_devices, link=link))
    changed: dict[str, Any] = {
        "devices_per_node": per_node,
        "max_devices": num_devices,
        "tiers": tuple(found),
    }
    if group.memory_gib is not None:
        memory = {"value": group.memory_gib * GIB, "origin": "assumed", "detail": "cluster file"}
        changed["memory_bytes"] = record.memory_bytes.model_copy(update=memory)
    # What is known of a device, such as its training rates, is found by what stands before the @.
    file = profile.file.model_copy(
        update={"name": f"{profile.name}@{name}", "cluster": record.model_copy(update=changed)}
    )
    mine = Profile(file, profile.ops, profile.collectives)
    return DeviceGroup(name=name, profile=mine, num_devices=num_devices)


def _read(path: Path) -> _ClusterFile:
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ProfileError(f"no cluster file {path}; write one as docs/profiles.md shows") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path} is not a readable TOML file: {error}") from None
    try:
        return _ClusterFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its parts"
        raise ProfileError(
            f"{path} is wrong at {where}: {first['msg']}; write it as docs/profiles.md shows"
        ) from None
