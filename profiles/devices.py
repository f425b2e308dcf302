"""Devices and clusters that come with planner: a JSON file each, in `profiles/data`.

`devices/NAME.json` is a `DeviceFile`, `clusters/NAME.json` a `ClusterFile`. A device that names a
cluster is a shipped profile: `shipped_profile` makes of both what a measured `profile.json` holds.
Other devices have a data sheet only; they are priced as their reference device, scaled by it.
To add a device is to add its file; docs/profiles.md lists the fields.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from planner.errors import ProfileError
from planner.files import write_atomically
from planner.units import GB, GIB, TB, TFLOP
from profiles.hosts import ASSUMED, HostSpec
from profiles.records import (
    MOST_DEVICES,
    ClusterRecord,
    CollectiveFit,
    Figure,
    HostWork,
    LinkRecord,
    OpFit,
    PaceKind,
    ProfileFile,
    Record,
    StepFit,
)

DATA = Path(__file__).parent / "data"
FLOAT8_RATES = ("float8_e4m3fn", "float8_e5m2", "mxfp8")
"""Under what a device has rates of products of 8-bit floats."""
REPORTED = 0.988
"""A driver reports about so many GiB for each gigabyte of a data sheet: 79.1 of 80 on an H100,
139.8 of 141 on an H200, 178.4 of 180 on a B200."""

_R = TypeVar("_R", bound=Record)


class TrainingRates(Record):
    """Rates that were fitted to published training runs, with how well they fit."""

    num_multiprocessors: Figure
    rates: dict[str, Figure]
    """Fitted parameters of `costmodel.table.kernels.DeviceRates`, by name."""
    residuals: dict[str, float] = Field(default_factory=dict)
    """Mean absolute relative error left, by source of the runs."""


class ShippedDevice(Record):
    """What a device needs to be a profile: the compute part of a `ProfileFile`."""

    cluster: str
    """The cluster file with the nodes and links it is described in."""
    device: str
    """The name its driver reports."""
    device_type: str
    """As torch names it, such as cuda."""
    driver_pattern: str
    """Regular expression, sought in the name a driver reports: which profile is of a found GPU."""
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    peak_flop_per_s: dict[str, Figure]
    """Dense products, by dtype."""
    context_bytes: Figure
    """This and what follows: as in a `ProfileFile`."""
    allocator_overhead_fraction: Figure
    launch_overhead_s: Figure
    host_work: dict[HostWork, Figure] = Field(default_factory=dict)
    typical_slowdown: dict[PaceKind, Figure] = Field(default_factory=dict)
    overlap_slowdown: dict[str, Figure] = Field(default_factory=dict)
    block_correction: dict[Literal["forward", "backward"], Figure] = Field(default_factory=dict)
    compiled_block_correction: dict[Literal["forward", "backward"], Figure] = Field(
        default_factory=dict
    )
    step_fits: tuple[StepFit, ...] = ()
    op_fits: tuple[OpFit, ...] = ()
    training: TrainingRates | None = None
    training_of: str | None = None
    """Another device whose training rates are used, as no runs of this one are published."""


class DeviceFile(Record):
    """A device that rows or profiles may name. Figures are those of the vendor's data sheet; what
    is None is as on the reference device.
    """

    format: Literal["planner-device"] = "planner-device"
    name: str
    """As people write it."""
    pattern: str
    """Regular expression, sought in a name of which only capital letters and digits are left. Of
    several devices that match, the one with the longest pattern is meant."""
    reference: str
    """The shipped device whose rates it is priced with; of a shipped one, itself."""
    tflop_per_s: float | None = Field(default=None, gt=0)
    """Dense 16-bit products, in 1e12 flop per second."""
    float8_tflop_per_s: float | None = Field(default=None, gt=0)
    """Dense 8-bit products; None: as many times 16-bit ones as on the reference device."""
    memory_tb_per_s: float | None = Field(default=None, gt=0)
    memory_gb: float | None = Field(default=None, gt=0)
    num_multiprocessors: int | None = Field(default=None, ge=1)
    link_gb_per_s: float | None = Field(default=None, gt=0)
    """Links between devices of a node, one direction."""
    devices_per_node: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    """How many devices that link joins."""
    host_scale: float = Field(default=1.0, gt=0)
    """Seconds that its host takes to issue an op, over those of the reference device's host."""
    float4_per_float8: float | None = Field(default=None, gt=0)
    """Peak of 4-bit products over that of 8-bit ones, of a device that has both; the reference
    device's where none is given."""
    source: str = ""
    """Where the data sheet's figures are from, and which of them are not on it."""
    shipped: ShippedDevice | None = None

    @model_validator(mode="after")
    def _says_where_from(self) -> Self:
        re.compile(self.pattern)
        if self.shipped is None and not self.source:
            raise ValueError("a data sheet needs its source")
        return self

    def __hash__(self) -> int:
        """Return a hash, so that answers about a device can be kept; fields hold dicts."""
        return hash(self.name)


class ClusterFile(Record):
    """Nodes of one kind of device: how many to a node, their links and host."""

    format: Literal["planner-cluster"] = "planner-cluster"
    devices_per_node: int = Field(ge=1, le=MOST_DEVICES)
    max_devices: int | None = Field(default=None, ge=1)
    intra_node: LinkRecord
    inter_node: LinkRecord
    other_inter_node: dict[str, LinkRecord] = Field(default_factory=dict)
    """Links to choose instead, by the suffix of the profile's name: NAME@SUFFIX."""
    host: HostSpec
    collective_fits: tuple[CollectiveFit, ...] = ()


def device_names() -> tuple[str, ...]:
    """Return the names of all device files, in alphabetical order."""
    return tuple(sorted(path.stem for path in (DATA / "devices").glob("*.json")))


def device_file(name: str) -> DeviceFile:
    """Return a device by the name of its file; raise ProfileError if it is missing or damaged."""
    return _load(DATA / "devices" / f"{name}.json", DeviceFile)


def cluster_file(name: str) -> ClusterFile:
    """Return a cluster by the name of its file; raise ProfileError if it is missing or damaged."""
    return _load(DATA / "clusters" / f"{name}.json", ClusterFile)


def save_device(name: str, device: DeviceFile) -> None:
    """Write a device's file."""
    _save(DATA / "devices" / f"{name}.json", device)


def save_cluster(name: str, cluster: ClusterFile) -> None:
    """Write a cluster's file."""
    _save(DATA / "clusters" / f"{name}.json", cluster)


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with planner."""
    return tuple(name for name in device_names() if device_file(name).shipped)


def shipped_profile(name: str) -> ProfileFile:
    """Return a shipped device in its cluster, as a measured profile would describe it."""
    device = device_file(name).shipped
    if device is None:
        raise ProfileError(f"device {name} has a data sheet only, so it is not a profile")
    cluster = cluster_file(device.cluster)
    return ProfileFile(
        name=name,
        source="shipped",
        complete=True,
        cluster=ClusterRecord(
            device=device.device,
            device_type=device.device_type,
            devices_per_node=cluster.devices_per_node,
            max_devices=cluster.max_devices,
            memory_bytes=device.memory_bytes,
            memory_bytes_per_s=device.memory_bytes_per_s,
            peak_flop_per_s=device.peak_flop_per_s,
            intra_node=cluster.intra_node,
            inter_node=cluster.inter_node,
            other_inter_node=cluster.other_inter_node,
        ),
        context_bytes=device.context_bytes,
        allocator_overhead_fraction=device.allocator_overhead_fraction,
        launch_overhead_s=device.launch_overhead_s,
        host_work=device.host_work,
        typical_slowdown=device.typical_slowdown,
        overlap_slowdown=device.overlap_slowdown,
        block_correction=device.block_correction,
        compiled_block_correction=device.compiled_block_correction,
        step_fits=device.step_fits,
        op_fits=device.op_fits,
        collective_fits=cluster.collective_fits,
    )


def shipped_for_gpu(gpu: str) -> str | None:
    """Return the shipped profile of a GPU by the name its driver reports, if there is one.

    A variant with a data sheet of its own ("NVIDIA H100 PCIe", "NVIDIA H100 NVL") is not the device
    whose name it shares: `profile_for_gpu` scales that one's profile.
    """
    if _sheet_for_gpu(gpu) is not None:
        return None
    for name in device_names():
        shipped = device_file(name).shipped
        if shipped and re.search(shipped.driver_pattern, gpu):
            return name
    return None


def profile_for_gpu(gpu: str) -> ProfileFile | None:
    """Return what planner has for a GPU by the name its driver reports: its shipped profile, or of
    a device with a data sheet only its reference device's, scaled; None for an unknown one.
    """
    if name := shipped_for_gpu(gpu):
        return shipped_profile(name)
    sheet = _sheet_for_gpu(gpu)
    return None if sheet is None else scaled_profile(sheet, gpu)


def _sheet_for_gpu(gpu: str) -> DeviceFile | None:
    """Return the device of a driver's name where that has a data sheet and no profile."""
    device = named_device(re.sub(r"[^A-Z0-9]", "", gpu.upper()))
    return device if device is not None and device.shipped is None else None


def scaled_profile(sheet: DeviceFile, gpu: str) -> ProfileFile:
    """Return the reference device's profile as it holds for a device with a data sheet only.

    Rates of products, of memory and of links scale as those on the data sheets; `gpu` is the name
    its driver reports. Overheads, the context and the number of devices between which a link is
    stay as they are.
    """
    file = shipped_profile(sheet.reference)
    cluster = file.cluster

    def scaled(figure: Figure, factor: float) -> Figure:
        detail = f"{figure.detail}; scaled by the data sheet of {sheet.name}"
        return Figure(value=figure.value * factor, origin="data sheet", detail=detail)

    def speed(stated: float | None, unit: float, figure: Figure) -> float:
        """Return the device's rate over its reference's; 1 where the sheet does not say."""
        return 1.0 if stated is None else stated * unit / figure.value

    compute = speed(sheet.tflop_per_s, TFLOP, cluster.peak_flop_per_s["bfloat16"])
    memory = speed(sheet.memory_tb_per_s, TB, cluster.memory_bytes_per_s)
    link = cluster.intra_node.beta_s_per_byte
    if sheet.link_gb_per_s is not None:
        link = scaled(link, 1 / (sheet.link_gb_per_s * GB) / link.value)
    size = cluster.memory_bytes
    if sheet.memory_gb is not None:
        size = scaled(size, sheet.memory_gb * GIB * REPORTED / size.value)

    def compute_of(dtype: str) -> float:
        narrow = cluster.peak_flop_per_s.get(dtype)
        if dtype in FLOAT8_RATES and narrow is not None and sheet.float8_tflop_per_s:
            return sheet.float8_tflop_per_s * TFLOP / narrow.value
        return compute

    return file.model_copy(
        update={
            "name": f"{sheet.reference} scaled to {sheet.name}",
            "cluster": cluster.model_copy(
                update={
                    "device": gpu,
                    "memory_bytes": size,
                    "memory_bytes_per_s": scaled(cluster.memory_bytes_per_s, memory),
                    "peak_flop_per_s": {
                        dtype: scaled(figure, compute_of(dtype))
                        for dtype, figure in cluster.peak_flop_per_s.items()
                    },
                    "intra_node": cluster.intra_node.model_copy(update={"beta_s_per_byte": link}),
                }
            ),
            "op_fits": tuple(
                fit.model_copy(
                    update={
                        "s_per_flop": fit.s_per_flop / compute_of(fit.dtype),
                        "s_per_byte": fit.s_per_byte / memory,
                        "detail": f"{fit.detail}; scaled by the data sheet of {sheet.name}",
                    }
                )
                for fit in file.op_fits
            ),
        }
    )


def host_of(device: str) -> HostSpec:
    """Return the host of the vendor's own system with a device; of an unknown one, as assumed.

    `device` is the name its driver reports.
    """
    for name in device_names():
        shipped = device_file(name).shipped
        if shipped and shipped.device == device:
            return cluster_file(shipped.cluster).host
    return ASSUMED


def named_device(text: str) -> DeviceFile | None:
    """Return the device that a name means: of those that match, the one with the longest pattern,
    of equally long ones the first.

    `text` holds capital letters and digits only.
    """
    found = [
        (len(device.pattern), -match.start(), device)
        for device in map(device_file, device_names())
        if (match := re.search(device.pattern, text))
    ]
    return max(found, key=lambda each: each[:2])[2] if found else None


@lru_cache(maxsize=256)
def _load(path: Path, kind: type[_R]) -> _R:
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ProfileError(f"planner has no file {path}; restore it") from None
    except (OSError, ValueError, ValidationError) as error:
        reason = "; ".join(str(error).splitlines()[:3])
        raise ProfileError(f"{path} is damaged ({reason}); restore it") from None


def _save(path: Path, record: DeviceFile | ClusterFile) -> None:
    data = record.model_dump(mode="json", exclude_defaults=True)
    write_atomically(path, json.dumps({"format": record.format, **data}, indent=1) + "\n")
    _load.cache_clear()
