"""Plan: everything needed to train a model one way on a cluster, as a versioned JSON file.

A plan holds decisions only. What follows from them (job table, local shapes, groups,
collectives) is derived again when it runs, so it cannot drift. The ranks of a stage form a mesh
with the axes of `planner.language.layout.axes`; stages follow each other, so rank = pp_rank times
the ranks of a stage, plus the place in its mesh. A pp rank may have sizes of its own (`Plan.mesh`);
it then numbers its ranks by these.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from math import lcm
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from planner.errors import LayoutError
from planner.language.graph.batch_split import BatchSplit
from planner.language.graph.unit import Unit
from planner.language.layout import axes
from planner.language.layout.axes import (
    Degrees,
    check_experts_mesh,
    degree_names,
    lowered_axes,
)
from planner.language.layout.class_layout import MOST, ClassLayout, DegreesField, Record, gathered
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.plan.accepted import check_accept
from planner.language.plan.parts import (
    ClassRecompute,
    ClusterRef,
    ModelRef,
    Precision,
    Predicted,
    Recompute,
    StagePlan,
    ZeroStage,
)

PLAN_VERSION = 2

OURS = "ours-eager"
"""This project's runtime, for which plans are priced where nothing else is said."""

Kernels = Literal["eager", "compiled", "graphs"]
"""How this project's runtime runs blocks: op by op, as compiled graphs, or as these in CUDA graphs,
each of which the host starts as one."""

RUNTIME_OF: dict[Kernels, str] = {
    "eager": OURS,
    "compiled": "ours-compiled",
    "graphs": "ours-graphs",
}
"""The name under which this project's runtime is priced with each."""


Overlap = Literal["none", "input-gradients"]
"""What of a backward runs beside the collectives of its blocks, by choice."""


def kernels_of(execution: str) -> Kernels:
    """Return the kernels of a plan that is priced for a runtime; of other systems', the usual."""
    return next((kernels for kernels, name in RUNTIME_OF.items() if name == execution), "eager")


class Plan(Record):
    """How to train: degrees, microbatches, schedule, precision, stages and layouts.

    In a file the degrees are fields by the names of the axes (``"dp": 2, "tp": 4``).

    Attributes:
        format: marks the file as a plan.
        version: of the file's form.
        model: the model it is for.
        cluster: the cluster it was searched for.
        degrees: size of each axis of a stage's mesh; a stage may have sizes of its own.
        pp: pipeline ranks.
        vpp: stages of each pipeline rank.
        microbatch_size: samples of a microbatch in each part that the batch axes cut; with `shares`
            their mean. Where samples belong together (`ModelRef.unit`) parts hold whole units.
        shares: samples of a microbatch in each of these parts, in the order of ranks, where they
            differ: as much as the devices of each are fast. Empty: equal parts.
        num_microbatches: microbatches of a step.
        schedule: name of the pipeline schedule.
        table: the jobs of each pp rank where the schedule was synthesised
            (`planner.language.plan.schedule_of.schedule_of`).
        zero_stage: what ZeRO shards over the ranks with the same parameters.
        precision: "bf16" holds parameters and activations in bfloat16, "fp16" in float16, with fp32
            master copies for the optimizer and fp32 sums of gradients, those of "fp16" of a loss
            that is scaled; "fp8" is "bf16" with linear layers and experts of repeated blocks
            multiplied in 8-bit floats, each row of a factor scaled by its own largest value,
            "fp8-tensorwise" with linear layers alone, one scale a factor, "mxfp8" with these, a
            scale for 32 neighbours in a row; "model" keeps the model's dtypes.
        optimizer_on_host: the optimizer steps on copies in host memory, where its state is.
        tables_on_host: parameters, by the model's names, that the host has: tables of which a
            device gets the rows that are looked up. Their optimizer steps there.
        receive_ahead: how many jobs ahead a stage's receives are posted, so that messages travel
            while jobs run, at the cost of a buffer each; with 0 they travel when they are waited
            for. Two is enough where forwards and backwards alternate.
        recomputed: by class, the ops of selective recomputation; a class without an entry has the
            default choice (`planner.language.ops.recompute_choice`).
        stages: in forward order.
        layouts: of block classes, on each axis that blocks are lowered on.
        accept: what users accept of a batch that is cut, by the names of
        `planner.language.plan.accepted`:
            where the model computes across samples, parts of the batch compute with their own.
        kernels: "compiled" runs blocks as compiled graphs where their ops allow it; "graphs" these
            in CUDA graphs, where these hold them; "eager" op by op.
        overlap: "input-gradients" makes weight gradients while the collectives are under way that
            sum or gather input gradients inside blocks (`planner.language.ops.weight_products`);
            "none" waits for each of these at once.
        gather_pieces: in how many pieces rows that ranks gather ahead of products, or sum and
            scatter behind one, travel in a forward beside these
            (`planner.language.ops.weight_products`).
        logit_rows: of how many tokens a rank makes logits at a time, where the loss is of a
            product's results alone (`planner.language.lowering.passes.losses_in_chunks`); the
            backward makes them again. 0: of all at once, which it saves.
        estimate: what the search predicted, in named parts (seconds and bytes), for `show` and
            `compare`; running ignores it.
        execution: the runtime whose step `estimate` is; running ignores it, too.
    """

    format: Literal["planner-plan"] = "planner-plan"
    version: int = PLAN_VERSION
    model: ModelRef
    cluster: ClusterRef
    degrees: DegreesField
    pp: int = Field(ge=1, le=MOST)
    vpp: int = Field(ge=1, le=MOST)
    microbatch_size: int = Field(ge=1, le=MOST)
    num_microbatches: int = Field(ge=1, le=MOST)
    shares: tuple[Annotated[int, Field(ge=1, le=MOST)], ...] = ()
    schedule: str
    table: tuple[str, ...] = ()
    zero_stage: ZeroStage
    precision: Precision = "model"
    optimizer_on_host: bool = False
    tables_on_host: tuple[str, ...] = ()
    receive_ahead: int = Field(ge=0, le=MOST, default=2)
    recomputed: tuple[ClassRecompute, ...] = ()
    stages: tuple[StagePlan, ...]
    layouts: tuple[ClassLayout, ...]
    accept: tuple[str, ...] = ()
    kernels: Kernels = "eager"
    overlap: Overlap = "none"
    gather_pieces: int = Field(ge=1, le=MOST, default=1)
    logit_rows: int = Field(ge=0, le=MOST, default=0)
    estimate: dict[str, Any] = Field(default_factory=dict)
    execution: str = OURS

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        data = gathered(data, "degrees", degree_names())
        if isinstance(data, dict) and isinstance(data.get("degrees"), dict):
            for axis in axes.AXES:
                if axis.in_every_file and axis.name not in data["degrees"]:
                    raise ValueError(f"it has no {axis.name}")
        return data

    @model_serializer(mode="wrap")
    def _spread(self, handler: Any) -> dict[str, Any]:
        spread: dict[str, Any] = {}
        for key, value in handler(self).items():
            spread |= value if key == "degrees" else {key: value}
        # The rule, which plans need not state.
        if not self.accept:
            spread.pop("accept", None)
        if self.kernels == "eager":
            spread.pop("kernels", None)
        if self.overlap == "none":
            spread.pop("overlap", None)
        if self.gather_pieces == 1:
            spread.pop("gather_pieces", None)
        if not self.logit_rows:
            spread.pop("logit_rows", None)
        return spread

    @field_validator("accept")
    @classmethod
    def _accepts_what_there_is(cls, accept: tuple[str, ...]) -> tuple[str, ...]:
        check_accept(accept)
        return accept

    @field_validator("estimate")
    @classmethod
    def _can_be_shown(cls, estimate: dict[str, Any]) -> dict[str, Any]:
        if estimate:
            Predicted.model_validate(estimate)
        return estimate

    @property
    def runs_as(self) -> str:
        """The name under which this project's runtime is priced with the plan's kernels."""
        return RUNTIME_OF[self.kernels]

    @property
    def is_compiled(self) -> bool:
        """Whether blocks run as compiled graphs, in CUDA graphs or not."""
        return self.kernels != "eager"

    @property
    def makes_beside(self) -> bool:
        """Whether weight gradients are made beside collectives of input gradients."""
        return self.overlap == "input-gradients"

    @property
    def overlaps(self) -> bool:
        """Whether anything runs beside collectives inside blocks."""
        return self.makes_beside or self.gather_pieces > 1

    @property
    def dp(self) -> int:
        """Replicas of the model with samples of their own."""
        return self.degrees["dp"]

    @property
    def cp(self) -> int:
        """Parts of every sequence."""
        return self.degrees["cp"]

    @property
    def tp(self) -> int:
        """Parts of parameters and heads."""
        return self.degrees["tp"]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.degrees.num_ranks * self.pp

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch over all ranks."""
        return self.degrees.along("batch") * self.microbatch_size

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.microbatch_samples * self.num_microbatches

    @property
    def unit(self) -> Unit:
        """The samples that belong together; a graph counts these, not samples."""
        return self.model.unit

    @property
    def microbatch_units(self) -> int:
        """Units of one microbatch over all ranks."""
        return self.microbatch_samples // self.unit.size

    @property
    def global_units(self) -> int:
        """Units per step over all ranks."""
        return self.global_batch // self.unit.size

    @property
    def unit_shares(self) -> tuple[int, ...]:
        """The same as `shares`, in units."""
        return tuple(share // self.unit.size for share in self.shares)

    @property
    def batch_parts(self) -> int:
        """Parts of a microbatch of which every stage's cut puts some together."""
        return lcm(*(self.stage_degrees(index).along("batch") for index in range(len(self.stages))))

    @property
    def least_batch(self) -> int:
        """Samples of the smallest batch of a step: a unit for each microbatch and part of it."""
        return self.least_units * self.unit.size

    @property
    def least_units(self) -> int:
        """Units of the smallest batch of a step."""
        if self.shares:  # of so many the smallest share is a unit
            return self.num_microbatches * -(-self.microbatch_units // min(self.unit_shares))
        parts = (self.stage_degrees(index).along("batch") for index in range(len(self.stages)))
        return self.num_microbatches * max(parts)

    @property
    def shares_spelled(self) -> str:
        """Shares of a microbatch, equal neighbours together: "3 x 5, 1 x 1"."""
        runs = [(share, len(list(equal))) for share, equal in groupby(self.shares)]
        return ", ".join(f"{count} x {share}" for share, count in runs)

    @property
    def split(self) -> BatchSplit:
        """Which units of a full batch are in which microbatch and part."""
        shares = self.unit_shares or (1,) * self.batch_parts
        return BatchSplit.by_shares(
            self.global_units, num_microbatches=self.num_microbatches, shares=shares
        )

    @property
    def stage_to_pp_rank(self) -> tuple[int, ...]:
        """The pp rank that holds each stage."""
        return tuple(stage.pp_rank for stage in self.stages)

    @property
    def recompute_by_block(self) -> tuple[Recompute, ...]:
        """What each block of the model recomputes."""
        return tuple(choice for stage in self.stages for choice in stage.recompute_by_block)

    def mesh(self, pp_rank: int) -> ProcessMesh:
        """Return the ranks of a pp rank, with their axes."""
        own = next((s.own_sizes for s in self.stages if s.pp_rank == pp_rank and s.own_sizes), ())
        degrees = self.degrees.with_own(own)
        count = degrees.num_ranks
        ranks = tuple(range(pp_rank * count, (pp_rank + 1) * count))
        folded = None
        if degrees.expert_parts > 1:
            sides = degrees.experts_mesh
            folded = ProcessMesh(axes=tuple(sides), shape=tuple(sides.values()), ranks=ranks)
        return ProcessMesh(
            axes=tuple(degrees), shape=tuple(degrees.values()), ranks=ranks, folded=folded
        )

    def layout(self, class_index: int, *, axis: str, degrees: Degrees) -> ClassLayout | None:
        """Return a class's layout on an axis for stages of these degrees; None: replicated."""
        if degrees[axis] == 1:
            return None
        return next(
            (
                layout
                for layout in self.layouts
                if (layout.class_index, layout.axis) == (class_index, axis)
                and self.degrees.with_own(layout.own_sizes) == degrees
            ),
            None,
        )

    def layouts_of(self, class_index: int, *, degrees: Degrees) -> tuple[ClassLayout, ...]:
        """Return a class's layouts for stages of these degrees: on axes that blocks are lowered on,
        innermost first, and on ep.
        """
        axes = (*(axis.name for axis in lowered_axes()), "ep")
        found = (self.layout(class_index, axis=axis, degrees=degrees) for axis in axes)
        return tuple(layout for layout in found if layout is not None)

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the host's memory holds: tables, optimizer, activations."""
        found = {
            "tables": bool(self.tables_on_host),
            "optimizer": self.optimizer_on_host,
            "activations": any(stage.activations_on_host for stage in self.stages),
        }
        return tuple(what for what, is_there in found.items() if is_there)

    @property
    def device_groups(self) -> tuple[str, ...]:
        """The group of devices that each pp rank lies on."""
        by_rank = {stage.pp_rank: stage.device_group for stage in self.stages}
        return tuple(by_rank[rank] for rank in range(self.pp))

    def stage_degrees(self, stage_index: int) -> Degrees:
        """The sizes of a stage's mesh."""
        return self.degrees.with_own(self.stages[stage_index].own_sizes)

    def stage_microbatch_size(self, stage_index: int) -> int:
        """Units of one microbatch in each part that the batch axes of a stage cut: what sizes of
        the stage's graph count.
        """
        return self.microbatch_units // self.stage_degrees(stage_index).along("batch")

    @model_validator(mode="after")
    def _orders_its_own_kernels(self) -> Plan:
        if self.gather_pieces > 1 and self.is_compiled:
            raise ValueError(
                f"gather_pieces is {self.gather_pieces} and kernels are compiled, whose graphs "
                "have an order of their own; use eager kernels, or gather_pieces 1"
            )
        if self.zero_stage and self.kernels == "graphs":
            raise ValueError(
                f"zero_stage is {self.zero_stage} and kernels are graphs, which read parameters "
                "where they were captured, and ZeRO gathers them elsewhere each time; use compiled "
                "kernels, or zero_stage 0"
            )
        return self

    @model_validator(mode="after")
    def _is_of_this_world(self) -> Plan:
        for what, number in (
            ("ranks", self.world_size),
            ("forwards of all stages", self.pp * self.vpp * self.num_microbatches),
        ):
            if number > MOST:
                raise ValueError(f"it has {number} {what}; {MOST} are the most")
        return self

    @model_validator(mode="after")
    def _holds_whole_units(self) -> Plan:
        shares = (("a share", share) for share in self.shares)
        for what, number in (("microbatch_size", self.microbatch_size), *shares):
            if why := self.unit.why_not(number):
                raise ValueError(f"{what} is {number}, and {why}")
        return self

    @model_validator(mode="after")
    def _meshes_fit(self) -> Plan:
        shape_of_rank: dict[int, Degrees] = {}
        for index, stage in enumerate(self.stages):
            own = " ".join(f"{axis}={size}" for axis, size in stage.own_sizes) or "no own sizes"
            try:
                shape = self.stage_degrees(index)
                check_experts_mesh(shape)
            except LayoutError as error:
                raise ValueError(f"stage {index}: {error}") from None
            if self.microbatch_units % shape.along("batch"):
                raise ValueError(
                    f"stage {index} has {own}, so it cuts the {self.microbatch_units} "
                    f"{'samples' if self.unit.is_sample else self.unit.spelled} of a microbatch in "
                    f"{shape.along('batch')} parts, which does not divide them"
                )
            if shape_of_rank.setdefault(stage.pp_rank, shape) != shape:
                raise ValueError(
                    f"stage {index} has {shape} and another stage of pp rank {stage.pp_rank} has "
                    f"{shape_of_rank[stage.pp_rank]}; stages of one pp rank share its mesh"
                )
        cuts = sorted({shape.along("batch") for shape in shape_of_rank.values()})
        if self.unit.runs > 1 and len(cuts) > 1:
            raise ValueError(
                f"samples belong together in {self.unit.spelled} and stages cut them in "
                f"{' and '.join(map(str, cuts))} parts, between which no stage hands on samples "
                "that lie apart; give all stages one mesh"
            )
        return self

    @model_validator(mode="after")
    def _shares_add_up(self) -> Plan:
        if not self.shares:
            return self
        cuts = {self.stage_degrees(index).along("batch") for index in range(len(self.stages))}
        if cuts != {len(self.shares)}:
            raise ValueError(
                f"{len(self.shares)} shares given; its stages cut a microbatch in "
                f"{' and '.join(map(str, sorted(cuts)))} parts, and each part has a share"
            )
        if sum(self.shares) != self.microbatch_samples:
            raise ValueError(
                f"shares add up to {sum(self.shares)} samples; a microbatch has "
                f"{self.microbatch_samples}"
            )
        return self

    @model_validator(mode="after")
    def _lies_on_groups(self) -> Plan:
        group_of_rank: dict[int, str] = {}
        for index, stage in enumerate(self.stages):
            own = group_of_rank.setdefault(stage.pp_rank, stage.device_group)
            if own != stage.device_group:
                raise ValueError(
                    f"stage {index} lies on device group {stage.device_group!r} and another "
                    f"stage of pp rank {stage.pp_rank} on {own!r}; stages of one pp rank share "
                    "its devices"
                )
        return self

    @model_validator(mode="after")
    def _holds_together(self) -> Plan:
        if len(self.stages) != self.pp * self.vpp:
            raise ValueError(f"{len(self.stages)} stages given; pp*vpp={self.pp * self.vpp} needed")
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.first_block != expected or stage.last_block < stage.first_block:
                raise ValueError(
                    f"stage {index} holds blocks {stage.first_block}..{stage.last_block}; "
                    f"stages must cover every block once, in order, so it must start at {expected}"
                )
            if stage.pp_rank >= self.pp:
                raise ValueError(f"stage {index} is on pp rank {stage.pp_rank} of {self.pp}")
            expected = stage.last_block + 1
        held = Counter(stage.pp_rank for stage in self.stages)
        for rank in range(self.pp):
            if held[rank] != self.vpp:
                raise ValueError(
                    f"pp rank {rank} holds {held[rank]} stages; each holds vpp={self.vpp}"
                )
        return self
