"""Parts of a plan: the model and cluster it is for, its stages, and what they recompute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from math import gcd
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    field_validator,
    model_serializer,
    model_validator,
)

from planner.errors import LayoutError, PlanError
from planner.language.graph import ModelGraph
from planner.language.graph.batch import tensor_paths
from planner.language.graph.unit import SAMPLE, Unit
from planner.language.layout.class_layout import MOST, OwnSizesField, Record, WithOwnSizes

Recompute = Literal["none", "selective", "full"]
Precision = Literal["model", "bf16", "fp16", "fp8", "fp8-tensorwise", "mxfp8"]
ZeroStage = Literal[0, 1, 2, 3]


def precision_named(text: str, *beside: str) -> Precision:
    """Return the precision of that name; raise LayoutError where there is none. Words that may be
    given `beside` a precision's name, which its caller reads, are named in that case.
    """
    for known in get_args(Precision):
        if text == known:
            return known
    names: list[str] = [*get_args(Precision), *beside]
    *others, last = names
    raise LayoutError(
        f"`precision` {text} was given; use {', '.join(others)} or {last}; "
        "model keeps the dtypes of the model file"
    )


_LOW_DTYPES: dict[Precision, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "bfloat16",
    "fp8-tensorwise": "bfloat16",
    "mxfp8": "bfloat16",
}
_SCALINGS: dict[Precision, str] = {
    "fp8": "rowwise",
    "fp8-tensorwise": "tensorwise",
    "mxfp8": "blocks",
}


def low_dtype(precision: Precision) -> str:
    """Return the dtype that a precision holds parameters and activations in, beside fp32 masters
    and fp32 sums of gradients; empty where they keep the model's own dtypes.
    """
    return _LOW_DTYPES.get(precision, "")


def scaling_named(precision: Precision) -> str:
    """Return how a precision scales the factors of products in 8 bits: each row ("rowwise"), the
    whole ("tensorwise") or neighbours in a row ("blocks"); empty where it has no such products.
    """
    return _SCALINGS.get(precision, "")


def gathers_narrow(
    precision: Precision, *, nodes: int, ranks_of_node: int, devices_of_node: int
) -> bool:
    """Whether ZeRO gathers weights in 8 bits among ranks on so many nodes, so many on each: where
    each weight has one scale, and no more than half of a node's devices bring the parts of others
    there. With all of a node's links casts take as long as they save.
    """
    is_slow = nodes > 1 and 2 * ranks_of_node <= max(2, devices_of_node)
    return is_slow and scaling_named(precision) == "tensorwise"


_Size = Annotated[int, Field(ge=0, le=2**40)]


InputSpec = tuple[tuple[str, str, tuple[_Size | tuple[_Size, _Size], ...]], ...]
"""The tensors of a batch: path, dtype, shape, each size a number or [per_sample, fixed]."""


class Bucket(Record):
    """Another shape that batches may have: the tensors of such a batch, and the graph of the model
    on it.
    """

    inputs: InputSpec
    fingerprint: str = Field(min_length=64, max_length=64)


class ModelRef(Record):
    """The model a plan is for: its name, file as given, and structural fingerprint.

    `inputs` lists the batch's tensor leaves; with `batch_tree` they are enough to capture the model
    again without a batch. Where samples belong together (`unit`), sizes of `inputs` count units of
    them. `buckets` are the other shapes that batches may have, the smallest first;
    none is larger than `inputs` in any dim.
    """

    name: str
    file: str
    fingerprint: str = Field(min_length=64, max_length=64)
    inputs: InputSpec
    batch_tree: Any
    buckets: tuple[Bucket, ...] = ()
    unit: Unit = SAMPLE

    @model_serializer(mode="wrap")
    def _without_usual(self, handler: Any) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.unit.is_sample:
            del data["unit"]  # (of most models: their files are what they were without units)
        return data

    @field_validator("batch_tree")
    @classmethod
    def _as_json(cls, tree: Any) -> Any:
        # Graphs that were kept have tuples for lists: equal plans must compare equal.
        return json.loads(json.dumps(tree))

    @model_validator(mode="after")
    def _names_its_tensors(self) -> ModelRef:
        unknown = tensor_paths(self.batch_tree) - {path for path, _, _ in self.inputs}
        if unknown:
            raise ValueError(f"batch_tree has the tensor {min(unknown)} and inputs has not")
        paths = [path for path, _, _ in self.inputs]
        if any([path for path, _, _ in bucket.inputs] != paths for bucket in self.buckets):
            raise ValueError("a bucket has other tensors than inputs")
        return self


class ClusterRef(Record):
    """The cluster a plan was searched for. `name` is a shipped profile, a directory, or that of a
    cluster file.

    `devices_per_node` are those of the smallest nodes; where there are groups of devices, `nodes`
    lists (group, devices of a node, nodes).
    """

    name: str
    device: str
    devices_per_node: int = Field(ge=1, le=MOST)
    nodes: tuple[tuple[str, int, int], ...] = ()

    def check_equal_nodes(self) -> None:
        """Raise PlanError where nodes have different numbers of devices, for what starts as many
        ranks on each.
        """
        if len({size for _, size, _ in self.nodes}) < 2:
            return
        told = ", ".join(f"{nodes} x {size} on {name}" for name, size, nodes in self.nodes)
        least = gcd(*(size for _, size, _ in self.nodes))
        raise PlanError(
            f"the plan is for nodes of different numbers of devices ({told}), and this launcher "
            f"starts as many ranks on each; start it by `planner launch`, or emit it for torchrun, "
            f"Slurm, Kubernetes or Ray; or give all groups of the cluster file a "
            f"`devices_per_node` of {least}, search again, and start a launcher for each {least} "
            f"devices of a node"
        )


class BlocksRecompute(Record):
    """What some blocks of a stage recompute, where that differs from the stage's other blocks."""

    first_block: int = Field(ge=0, le=MOST)
    last_block: int = Field(ge=0, le=MOST)
    recompute: Recompute


class StagePlan(WithOwnSizes):
    """One stage: a run of blocks on one pp rank.

    Attributes:
        pp_rank: the pp rank that holds it.
        first_block: index of its first block.
        last_block: index of its last block (inclusive).
        recompute: which activations are recomputed in the backward.
        recompute_blocks: runs of its blocks that recompute something else, in order.
        recompute_last: False keeps the activations of the step's last microbatch, whose backward
            follows at once.
        activations_on_host: what a microbatch saves for its backward is offloaded to the host
            where the wait is long enough (`planner.language.schedule.timing.offloads`).
        device_group: the group of devices that its ranks lie on, by its name in the cluster's file;
            empty in a cluster of equal devices. Of several, joined by +, the first holds the first
            replicas. Prices follow from it; running ignores it.
        own_sizes: sizes of its mesh that differ from the plan's, as (axis, size). The mesh has as
            many ranks as the others: one axis takes the rest (`Degrees.with_own`).
    """

    pp_rank: int = Field(ge=0, le=MOST)
    first_block: int = Field(ge=0, le=MOST)
    last_block: int = Field(ge=0, le=MOST)
    recompute: Recompute = "none"
    recompute_blocks: tuple[BlocksRecompute, ...] = ()
    recompute_last: bool = True
    activations_on_host: bool = False
    device_group: str = ""
    own_sizes: OwnSizesField = ()

    @property
    def device_groups(self) -> tuple[str, ...]:
        """The groups of devices that its replicas lie on, in order."""
        return tuple(self.device_group.split("+"))

    @property
    def blocks(self) -> range:
        """Indices of the stage's blocks."""
        return range(self.first_block, self.last_block + 1)

    @property
    def recompute_by_block(self) -> tuple[Recompute, ...]:
        """What each block recomputes, in the order of the stage's blocks."""
        by_block: list[Recompute] = [self.recompute] * len(self.blocks)
        for run in self.recompute_blocks:
            for block in range(run.first_block, run.last_block + 1):
                by_block[block - self.first_block] = run.recompute
        return tuple(by_block)

    @property
    def is_recomputed(self) -> bool:
        """Whether any block recomputes anything."""
        return any(choice != "none" for choice in self.recompute_by_block)

    @property
    def recompute_spelled(self) -> str:
        """What its blocks recompute, in words: "selective, full in 3..5"."""
        runs = (
            f"{run.recompute} in {run.first_block}"
            + (f"..{run.last_block}" if run.last_block > run.first_block else "")
            for run in self.recompute_blocks
        )
        return ", ".join([self.recompute, *runs])

    @model_validator(mode="after")
    def _recomputes_its_blocks(self) -> StagePlan:
        free = self.first_block
        for run in self.recompute_blocks:
            if not free <= run.first_block <= run.last_block <= self.last_block:
                raise ValueError(
                    f"recompute_blocks {run.first_block}..{run.last_block} of a stage of blocks "
                    f"{self.first_block}..{self.last_block}: runs are in order, apart and within "
                    f"the stage, so the next starts at {free} or later and ends by "
                    f"{self.last_block}"
                )
            free = run.last_block + 1
        return self


def recompute_fields(by_block: Sequence[Recompute], *, first_block: int) -> dict[str, Any]:
    """Return the fields of a stage whose blocks, from `first_block` on, recompute this.

    `recompute` is what most blocks do, of equally many what the later do.
    """
    general = max(reversed(by_block), key=by_block.count)
    runs, end = [], first_block
    for choice, blocks in groupby(by_block):
        first, end = end, end + len(list(blocks))
        if choice != general:
            runs.append(BlocksRecompute(first_block=first, last_block=end - 1, recompute=choice))
    return {"recompute": general, "recompute_blocks": tuple(runs)}


class ClassRecompute(Record):
    """The ops of one block class whose outputs a stage of recompute "selective" makes again."""

    class_index: int = Field(ge=0, le=MOST)
    ops: tuple[str, ...]


_Amount = Annotated[float, Strict(), Field(allow_inf_nan=False)]


class Compared(Record):
    """A plan that was run beside others: its prediction, and what it took or why it did not run."""

    predicted_s: _Amount
    measured_s: _Amount | None = None
    failure: str = ""


class Measured(Record):
    """What a plan took on a machine beside others, in turns (`planner.runtime.proofs.trials`)."""

    step_s: _Amount = Field(gt=0)
    """Median of the turns."""
    turns_s: tuple[_Amount, ...]
    """Median step of each turn."""
    steps_of_turn: int
    compared: tuple[Compared, ...]
    """All plans that were run, this one among them, the best predicted first."""


class MemoryRange(BaseModel):
    """Where the bytes of the fullest device lie, beside what it has."""

    model_config = ConfigDict(extra="allow")

    low_bytes: _Amount
    """Bytes that it is below one time in ten."""
    high_bytes: _Amount
    """Bytes that it is above one time in ten."""
    basis: str
    """What the width stands on."""
    total_bytes: _Amount
    """Bytes predicted."""
    limit_bytes: _Amount
    """Bytes that the search was allowed."""
    device_bytes: _Amount | None = None
    """Bytes that the device has; older plans do not say."""


class Predicted(BaseModel):
    """What `show` and `compare` read of an estimate; checked, and kept as the JSON data it is."""

    model_config = ConfigDict(extra="allow")

    step_s: _Amount = Field(gt=0)
    peak_bytes: _Amount
    time: dict[str, _Amount]
    memory: Annotated[list[dict[str, _Amount]], Field(min_length=1)]
    source: str
    relative_error: _Amount | None = None
    measured: Measured | None = None
    memory_interval: MemoryRange | None = None


def batch_spec(graph: ModelGraph) -> InputSpec:
    """Return the batch leaves as (path, dtype, shape); an affine size is (per_sample, fixed)."""
    return tuple(
        (
            t.fqn,
            t.dtype,
            tuple(s if isinstance(s, int) else (s.per_sample, s.fixed) for s in t.shape),
        )
        for t in (graph.tensor[name] for name in graph.batch_inputs)
    )
