"""What a profile is made of: questions, answers, and the records its files hold.

A profile directory has three files. `profile.json` is one `ProfileFile`: what the machine
is, memory, and fits. `ops.csv` and `collectives.csv` hold one `OpRecord` or
`CollectiveRecord` a line. Every number carries its origin: see `Origin`. docs/profiles.md
documents the files field by field.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from planner.cluster import ClusterSpec, Link, Tier
from planner.language.layout.class_layout import MOST as MOST_DEVICES

SCHEMA_VERSION = 3

Direction = Literal["forward", "backward"]
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)

PaceKind = Literal["product", "light"]
"""What an op's speed keeps step with when the machine's changes: see `clock.Pace`."""

Origin = Literal["measured", "data sheet", "published", "fitted", "assumed"]
"""Where a number is from: this machine, a vendor's data sheet, a published measurement, a
fit to published measurements, or a stated assumption. The accompanying `detail` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpQuery:
    """One operator on one device: the argument of `Profile.op_seconds`."""

    target: str
    """The ATen overload, such as ``aten.linear.default``."""
    shapes: tuple[tuple[int, ...], ...]
    """Local shapes of the tensor inputs, in order."""
    dtype: str
    """Of the first floating-point input, else of the first output."""
    direction: Direction
    """Forward, or the gradients of all differentiable inputs together."""
    flop: float
    """Of this direction."""
    num_bytes: float
    """Read and written in this direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The shape of a communicating group: `ranks_per_node` on each of `num_nodes` nodes.

    `domains` has, for each of the cluster's tiers, in how many of its domains the ranks lie; empty
    where they are in one domain of every tier.
    """

    ranks_per_node: int
    num_nodes: int = 1
    domains: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for an empty group."""
        if self.ranks_per_node < 1 or self.num_nodes < 1:
            raise ValueError(f"group {self} is empty; both numbers must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.num_nodes

    def __str__(self) -> str:
        apart = "".join(f"/{count}" for count in self.domains)
        return f"{self.ranks_per_node}x{self.num_nodes}{apart}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An answer: a time, what it stands on, and the expected relative error (one sigma)."""

    seconds: float
    source: str
    relative_error: float

    def times(self, factor: float) -> Lookup:
        """Return the answer of a device, or beside work, that takes so much longer."""
        return Lookup(
            seconds=self.seconds * factor,
            source=self.source,
            relative_error=self.relative_error,
        )


MOST = 1e24
"""Beyond any size, work or rate of a machine; what is computed from numbers up to it is finite."""


def _largest(value: Any) -> float:
    """Return the size of the number in nested tuples that is farthest from 0."""
    if isinstance(value, tuple):
        return max(map(_largest, value), default=0.0)
    return abs(value) if isinstance(value, int | float) else 0.0


class Record(BaseModel):
    """A part of a file: no unknown fields, no number that is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_of_this_world(self) -> Self:
        for name, value in vars(self).items():
            if _largest(value) > MOST:
                raise ValueError(f"{name} is beyond {MOST:g}")
        return self


class Figure(Record):
    """A number with its origin. The unit is in the field's name.

    `low` and `high` bound what was seen, where a number was measured more than once.
    """

    value: float = Field(ge=0, allow_inf_nan=False)
    origin: Origin
    detail: str = Field(min_length=1)
    low: float | None = None
    high: float | None = None

    @model_serializer(mode="wrap")
    def _without_blanks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class Provenance(Record):
    """How a number was measured; columns of every measured record. A probe is visited several
    times in the course of a measurement.
    """

    device: str
    """The name its driver reports."""
    driver: str
    """Version of the driver, or of the system's kernel on a CPU."""
    torch: str
    """Version of torch."""
    threads: int = Field(ge=1)
    """Host threads of a rank."""
    measured_at: str
    """Time of the last visit, as ISO 8601."""
    repeats: int = Field(ge=1)
    """Samples of all visits."""
    spread: float = Field(ge=0, allow_inf_nan=False)
    """Interquartile range of the visits at the undisturbed pace (of a single visit: of its
    samples) over their median."""
    visits: tuple[float, ...] = ()
    """Seconds of each visit."""

    @property
    def standard_error(self) -> float:
        """Relative standard error of the time: samples of one visit share its disturbances,
        so that only visits count as independent.
        """
        return self.spread / sqrt(max(len(self.visits), 1))


class OpRecord(Provenance):
    """One measured operator, all ranks of the node at work; `visits` are medians of samples, as
    they were. Target to direction, and work: as in `OpQuery`.
    """

    target: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    direction: Direction
    arguments: str
    """What is not a tensor, as JSON: tells apart probes that differ in a flag only."""
    flop: float = Field(ge=0)
    num_bytes: float = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """Of one call: the midmean of the visits, each scaled to the undisturbed machine."""
    warm_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of one call on inputs that stay in cache, where that was measured."""
    paces: tuple[float, ...] = ()
    """Seconds of a fixed piece of work beside each visit, by which visits are scaled; none on GPUs
    (`profiles.measure.visits`)."""


class CollectiveRecord(Provenance):
    """One measured collective. A visit is the mean of its calls: calls that wait for a thread now
    and then take many times their median, and a step pays for all.
    """

    kind: CollectiveKind
    """The collective."""
    num_bytes: int = Field(gt=0)
    """Of the full tensor: before a reduce-scatter, after an all-gather."""
    ranks_per_node: int = Field(ge=1)
    """Ranks of the group on each of its nodes."""
    num_nodes: int = Field(ge=1)
    """Nodes of the group."""
    concurrent_groups: int = Field(ge=1)
    """Groups that ran it at the same time."""
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """The midmean of its visits."""


class OpFit(Record):
    """`seconds = overhead_s + flop * s_per_flop + num_bytes * s_per_byte`.

    Coefficients are non-negative, fitted for least relative error.
    """

    family: str
    """An op family of `profiles.lookup.families`, or a single target."""
    dtype: str
    """That the ops compute in."""
    direction: Direction
    """Forward, or the gradients of all inputs."""
    overhead_s: float = Field(ge=0)
    """Seconds of an op however small."""
    s_per_flop: float = Field(ge=0)
    """Seconds for each flop."""
    s_per_byte: float = Field(ge=0)
    """Seconds for each byte read or written."""
    relative_error: float = Field(ge=0)
    """Median absolute relative residual."""
    num_samples: int = Field(ge=0)
    """Records it was fitted to."""
    origin: Origin
    """Where the samples are from."""
    detail: str
    """The same in words."""


class Piece(Record):
    """From `min_bytes` upward, n bytes cost `alpha_s + n * beta_s_per_byte`, and
    `sqrt(n) * gamma_s_per_sqrt_byte` where chunks are pipelined through several hops.

    With d hops, each chunk costing a + chunk * b, the best size of chunk gives
    (sqrt(d a) + sqrt(n b))^2, whose middle term grows with the root of n (Sanders, Speck,
    Traff: Two-tree algorithms for full bandwidth broadcast, 2009, section 2).
    """

    min_bytes: float = Field(ge=0)
    alpha_s: float = Field(ge=0)
    gamma_s_per_sqrt_byte: float = Field(default=0.0, ge=0)
    beta_s_per_byte: float = Field(ge=0)

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a message of the piece."""
        rate = self.gamma_s_per_sqrt_byte * sqrt(num_bytes)
        return self.alpha_s + rate + num_bytes * self.beta_s_per_byte

    def scaled(self, *, steps: float, share: float) -> Piece:
        """Return the piece of `steps` times the hops, each link carrying `share` times the
        bytes; where it begins stays as it is.
        """
        return self.model_copy(
            update={
                "alpha_s": self.alpha_s * steps,
                "gamma_s_per_sqrt_byte": self.gamma_s_per_sqrt_byte * sqrt(steps * share),
                "beta_s_per_byte": self.beta_s_per_byte * share,
            }
        )


class CollectiveFit(Record):
    """A piecewise alpha-beta line for one collective on one group shape."""

    kind: CollectiveKind
    """The collective."""
    ranks_per_node: int = Field(ge=1)
    """Ranks of the group on each of its nodes."""
    num_nodes: int = Field(ge=1)
    """Nodes of the group."""
    pieces: tuple[Piece, ...] = Field(min_length=1)
    """By rising size."""
    relative_error: float = Field(ge=0)
    """Median absolute relative residual."""
    num_samples: int = Field(ge=0)
    """Sizes it was fitted to."""
    origin: Origin
    """Where the samples are from."""
    detail: str
    """The same in words."""

    @property
    def group(self) -> Group:
        """The group shape."""
        return Group(ranks_per_node=self.ranks_per_node, num_nodes=self.num_nodes)


class LinkRecord(Record):
    """One link level; see `planner.cluster.Link`. Rates are per device and direction."""

    name: str
    alpha_s: Figure
    beta_s_per_byte: Figure

    def spec(self) -> Link:
        """Return the link without origins."""
        return Link(
            name=self.name,
            alpha_s=self.alpha_s.value,
            beta_s_per_byte=self.beta_s_per_byte.value,
        )


class TierRecord(Record):
    """A level of the network beyond the links of nodes; see `planner.cluster.Tier`."""

    devices: int = Field(ge=1)
    link: LinkRecord

    def spec(self) -> Tier:
        """Return the tier without origins."""
        return Tier(devices=self.devices, link=self.link.spec())


class NodeLinkRecord(Record):
    """What was measured between two nodes, a rank of each, while other pairs were measured too."""

    nodes: tuple[str, str]
    latency_s: float = Field(gt=0)
    """Of a message of 4 KiB."""
    bytes_per_s: float = Field(gt=0)
    """Of a message of 4 MiB, beyond its latency."""


class ClusterRecord(Record):
    """The machines."""

    device: str
    """The name its driver reports."""
    device_type: str
    """As torch names it, such as cuda."""
    devices_per_node: int = Field(ge=1, le=MOST_DEVICES)
    """Devices of a node."""
    max_devices: int | None = Field(default=None, ge=1)
    """Devices of the whole cluster; None where any number is taken to exist."""
    memory_bytes: Figure
    """Of a device."""
    memory_bytes_per_s: Figure
    """Of a device, read and written together."""
    peak_flop_per_s: dict[str, Figure] = Field(min_length=1)
    """Of a device's dense products, by dtype."""
    intra_node: LinkRecord
    """Links inside nodes."""
    inter_node: LinkRecord
    """Links between nodes."""
    other_inter_node: dict[str, LinkRecord] = Field(default_factory=dict)
    """Links between nodes to choose instead, by the suffix of the profile's name."""
    tiers: tuple[TierRecord, ...] = ()
    """Levels of links around neighbouring devices, by rising number of these."""

    def spec(self, name: str) -> ClusterSpec:
        """Return the description the search works with, without origins."""
        return ClusterSpec(
            name=name,
            device=self.device,
            device_type=self.device_type,
            devices_per_node=self.devices_per_node,
            max_devices=self.max_devices,
            memory_bytes=int(self.memory_bytes.value),
            memory_bytes_per_s=self.memory_bytes_per_s.value,
            peak_flop_per_s=tuple((k, f.value) for k, f in self.peak_flop_per_s.items()),
            intra_node=self.intra_node.spec(),
            inter_node=self.inter_node.spec(),
            tiers=tuple(tier.spec() for tier in self.tiers),
        )


ZeroWork = Literal["zero_forward", "zero_backward", "zero_reduce", "zero_gather"]
StepWork = Literal[
    "adamw", "sharded_adamw", "cast", "accumulate", "host_to_device", "device_to_host", ZeroWork
]
"""Work of a step beside its blocks: AdamW over float32 parameters, or over DTensors of them
(ZeRO; their dispatch costs host time per tensor); bfloat16 weights written from float32
masters; bfloat16 gradients added to float32 sums; copies between host and device; FSDP2's own
work for a block, without messages (`profiles.measure.timing.zero_timing`)."""


HostWork = Literal[
    "forward_op",
    "backward_op",
    "product_forward",
    "product_backward",
    "redistribute_forward",
    "redistribute_backward",
]
"""Work of the host beside a device that computes asynchronously: an op with autograd, forward and
in its backward; the runtime's product with a trained weight; the runtime's change of a tensor's
layout (`profiles.measure.timing.host_timing`)."""


class StepFit(Record):
    """`seconds = num_calls * s_per_call + num_tensors * s_per_tensor + num_bytes * s_per_byte`."""

    work: StepWork
    """The kind of work."""
    s_per_call: float = Field(default=0.0, ge=0)
    """Seconds for each block, of what is done block by block."""
    s_per_tensor: float = Field(ge=0)
    """Seconds for each tensor."""
    s_per_byte: float = Field(ge=0)
    """Seconds for each byte of the float32 tensors that are updated, read, summed into or
    copied."""
    relative_error: float = Field(ge=0)
    """Median absolute relative residual."""
    origin: Origin
    """Where the samples are from."""
    detail: str
    """The same in words."""


class WaitFit(Record):
    """By how much a collective amid compute takes longer than collectives back to back: ranks wait
    for the slowest.
    """

    s_per_call: float = Field(ge=0)
    """Seconds for each collective."""
    s_per_compute_s: float = Field(ge=0)
    """Seconds for each second of compute since the last collective."""
    s_per_redistribution: float = Field(default=0.0, ge=0)
    """Seconds more for each inside a block: the runtime's own work around it."""
    least_compute_s: float = Field(default=0.0, ge=0)
    """Least compute between two calls that was measured, in seconds. With less, a call takes that
    part of its seconds: back to back none, as caches are warm and no rank is late."""
    origin: Origin
    """Where the samples are from."""
    detail: str
    """The same in words."""


class DeviceSection(Record):
    """What was found of a device type that is not the one the profile stands for.

    Ops of all types are in ops.csv, told apart by their device.
    """

    device: str
    num_ranks: int = Field(ge=1)
    memory_bytes_per_s: Figure
    peak_flop_per_s: dict[str, Figure]
    op_fits: tuple[OpFit, ...]


class SkippedProbe(Record):
    """A probe that gave no number, and why (out of memory, crash, time limit)."""

    probe: str
    reason: str


class Observation(Record):
    """A time of a recorded run beside what the profile predicts of it without factors."""

    what: str
    """Such as ``F of stage 0``, ``optimizer of pp rank 0`` or ``step``."""
    measured_s: float = Field(gt=0)
    """Seconds, median of the steps."""
    standard_error: float = Field(ge=0)
    """Of the median, relative."""
    predicted_s: float = Field(gt=0)
    """Seconds with all factors 1."""
    parts_s: dict[str, float]
    """By term, seconds by which the prediction grows when the term's factor grows by 1."""


class Evidence(Record):
    """A file that a run was read from."""

    file: str
    """Its name."""
    stack: str
    """Who wrote it: ``Megatron-LM``."""
    digest: str
    """Of what it holds."""
    readings: int = Field(ge=0)
    """How many of its readings count."""


class CalibrationRun(Record):
    """What one recorded run says about a profile."""

    plan: str
    """Digest of the plan's decisions."""
    model: str
    """The model's name."""
    num_steps: int = Field(ge=1)
    """Recorded steps, without those that warm up."""
    recording: str
    """Digest of the recording: the same one counts once."""
    expert_imbalance: float | None = Field(default=None, ge=0)
    """Standard deviation of the logarithm of the rows that ranks received for their experts, as far
    as it shows on the fullest of them; None where no rows were exchanged."""
    observations: tuple[Observation, ...] = Field(min_length=1)
    memory_ratio: float | None = Field(default=None, gt=0)
    """Measured memory of the fullest device over the estimate, the context left out of both."""
    drift: float | None = Field(default=None, gt=0)
    """One sigma of what a run of its kind is off by beside all factors, relative; None: as the
    machine drifts."""
    evidence: tuple[Evidence, ...] = ()
    """Of a run of another stack, the files that tell it."""


class Factor(Record):
    """By how much work of a kind takes longer than the profile says; `sigma` is its error."""

    value: float = Field(gt=0)
    sigma: float = Field(ge=0)


class Calibration(Record):
    """Factors learned from recorded runs: see `profiles.calibration`.

    They follow from the runs, which are kept, so that a further run is one more and not a factor on
    a factor.
    """

    version: Literal[1] = 1
    factors: dict[str, Factor]
    """By term."""
    error_before: float = Field(ge=0)
    """Median relative error of what was recorded, without factors."""
    error_after: float = Field(ge=0)
    """The same with them: the residual of the fit."""
    runs: tuple[CalibrationRun, ...] = Field(min_length=1)


class ProfileFile(Record):
    """The contents of profile.json: one machine, what it can do, and where each number is from."""

    format: Literal["planner-profile"] = "planner-profile"
    version: int = SCHEMA_VERSION
    name: str
    """The host's, or of a shipped profile its device's."""
    source: Literal["measured", "shipped"]
    complete: bool
    """Whether every probe was reached within the budget."""
    conditions: dict[str, str | int] = Field(default_factory=dict)
    """What must be equal for a later run to add to the directory: device, driver, torch, ranks."""
    cluster: ClusterRecord
    context_bytes: Figure
    """Memory of a rank before its first tensor."""
    allocator_overhead_fraction: Figure
    """Peak memory reserved over peak bytes of live tensors, minus 1."""
    launch_overhead_s: Figure
    """Host time to issue an op."""
    host_work: dict[HostWork, Figure] = Field(default_factory=dict)
    """Host time of what takes longer to issue than an op without autograd; what is missing takes
    `launch_overhead_s`. On GPUs only."""
    typical_slowdown: dict[PaceKind, Figure] = Field(default_factory=dict)
    """Typical time of work of a kind over its time on the undisturbed machine. On GPUs of products
    only: under sustained load over that of short visits, as clocks follow power and heat."""
    overlap_slowdown: dict[str, Figure] = Field(default_factory=dict)
    """Factors by which `compute` and `communication` slow down while both run."""
    block_correction: dict[Direction, Figure] = Field(default_factory=dict)
    """Measured time of whole blocks over the sum of their ops."""
    compiled_block_correction: dict[Direction, Figure] = Field(default_factory=dict)
    """The same of compiled blocks."""
    step_fits: tuple[StepFit, ...] = ()
    """Work of a step beside its blocks, such as the optimizer."""
    collective_wait: WaitFit | None = None
    """What a collective amid compute takes longer, as ranks wait for the slowest."""
    op_fits: tuple[OpFit, ...] = ()
    collective_fits: tuple[CollectiveFit, ...] = ()
    calibration: Calibration | None = None
    """What recorded runs say of the numbers above."""
    runtime_calibrations: dict[str, Calibration] = Field(default_factory=dict)
    """By runtime (a record of `costmodel.execution`), what logs of its runs say of the training
    rates of the device."""
    other_devices: tuple[DeviceSection, ...] = ()
    """Other kinds of devices in the cluster; `cluster` is the slowest kind."""
    node_links: tuple[NodeLinkRecord, ...] = ()
    """Between each two nodes, where there are several."""
    skipped: tuple[SkippedProbe, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for people."""
    findings: tuple[str, ...] = ()
    """What of the machine is slower or other than its like: lines that name ranks and nodes."""
