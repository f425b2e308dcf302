"""Plan: everything needed to train a model one way on a cluster, as a versioned JSON file.

A plan holds decisions only. What follows from them (job table, local shapes, groups,
collectives) is derived again when it runs, so it cannot drift. Ranks are laid out
pp-major: rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank, so a tp group
is made of neighbours. A pp rank may cut its ranks into dp and tp in its own way
(`Plan.mesh`); it then numbers them by its own degrees.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from planner.errors import PlanError
from planner.graph.batch import tensor_paths
from planner.layout.layout import ProcessMesh
from planner.layout.placement import OpSharding, Partial, Placement, parse_placement

if TYPE_CHECKING:
    from planner.graph import ModelGraph, Program

PLAN_VERSION = 2

MOST = 2**20
"""The most ranks, jobs of a kind, samples of a microbatch, blocks: beyond any cluster there is, and
what a damaged file must not ask for, since lists of so many are made."""

Recompute = Literal["none", "selective", "full"]
Precision = Literal["model", "bf16"]
ZeroStage = Literal[0, 1, 2, 3]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Size = Annotated[int, Field(ge=0, le=2**40)]


class ModelRef(_Record):
    """The model a plan is for: its name, file as given, and structural fingerprint.

    `inputs` lists the batch's tensor leaves as (path, dtype, shape), a shape entry being a
    number or [per_sample, fixed]; with `batch_tree` they are enough to capture the model
    again without a batch.
    """

    name: str
    file: str
    fingerprint: str = Field(min_length=64, max_length=64)
    inputs: tuple[tuple[str, str, tuple[_Size | tuple[_Size, _Size], ...]], ...]
    batch_tree: Any

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
        return self


class ClusterRef(_Record):
    """The cluster a plan was searched for. `name` is a shipped profile or a directory."""

    name: str
    device: str
    devices_per_node: int = Field(ge=1, le=MOST)


class StagePlan(_Record):
    """One stage: blocks first..last (inclusive) on `pp_rank`.

    `recompute_last` False keeps the activations of the step's last microbatch, whose
    backward follows at once. `activations_on_host` sends what a microbatch keeps for its
    backward to the host in between, where the wait is long enough (`planner.schedule.trips`).
    `tp` is the stage's own tp degree (None: the plan's); its dp degree is then dp * tp / that,
    over the same number of ranks.
    """

    pp_rank: int = Field(ge=0, le=MOST)
    first_block: int = Field(ge=0, le=MOST)
    last_block: int = Field(ge=0, le=MOST)
    recompute: Recompute = "none"
    recompute_last: bool = True
    activations_on_host: bool = False
    tp: int | None = Field(default=None, ge=1, le=MOST)

    @property
    def blocks(self) -> range:
        """Indices of the stage's blocks."""
        return range(self.first_block, self.last_block + 1)


class ClassLayout(_Record):
    """Op placements of one block class on one mesh axis.

    `inputs`, `params` and `outputs` give the placement of the class program's own inputs,
    params and outputs, in order; `ops` an `OpSharding` per op that is not all-replicated.
    `tp` is the tp degree of the stages it is for (None: the plan's). A layout on cp is of the
    program that lowering on tp has made.
    """

    class_index: int = Field(ge=0, le=MOST)
    axis: Literal["tp", "cp"] = "tp"
    tp: int | None = Field(default=None, ge=1, le=MOST)
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[tuple[str, str], ...]

    @property
    def op_shardings(self) -> dict[str, OpSharding]:
        """Parsed `ops`."""
        return {name: OpSharding.parse(text) for name, text in self.ops}

    @property
    def param_placements(self) -> tuple[Placement, ...]:
        """Parsed `params`."""
        return tuple(parse_placement(text) for text in self.params)

    @model_validator(mode="after")
    def _parses(self) -> ClassLayout:
        for text in (*self.inputs, *self.outputs):
            parse_placement(text)
        for text in self.params:
            if isinstance(parse_placement(text), Partial):
                raise ValueError("a parameter rests whole or sharded (R or S(dim)), never partial")
        for _, text in self.ops:
            OpSharding.parse(text)
        return self


class ClassRecompute(_Record):
    """The ops of one block class whose outputs a stage of recompute "selective" makes again."""

    class_index: int = Field(ge=0, le=MOST)
    ops: tuple[str, ...]


_Amount = Annotated[float, Strict(), Field(allow_inf_nan=False)]


class _Estimate(BaseModel):
    """What `show` and `compare` read of an estimate; checked, and kept as the JSON data it is."""

    model_config = ConfigDict(extra="allow")

    step_s: _Amount = Field(gt=0)
    peak_bytes: _Amount
    time: dict[str, _Amount]
    memory: Annotated[list[dict[str, _Amount]], Field(min_length=1)]
    source: str
    relative_error: _Amount | None = None


class Plan(_Record):
    """How to train: degrees, microbatches, schedule, precision, stages and layouts.

    `precision` "bf16" holds parameters and activations in bfloat16, with fp32 master copies
    for the optimizer and fp32 sums of gradients; "model" keeps the dtypes the model has.
    With `optimizer_on_host` the optimizer steps on copies in host memory, where its state is.
    `receive_ahead` is how many jobs ahead a stage's receives are posted, so that messages
    travel while jobs run, at the cost of a buffer each; with 0 they travel when they are waited
    for. Two is enough where forwards and backwards alternate.
    `recomputed` lists, by class, the ops of selective recomputation; a class without an
    entry takes the default choice (`planner.ops.recompute_choice`).

    `num_microbatches` counts per dp replica, so the global batch is
    dp * microbatch_size * num_microbatches samples. `table` holds the jobs of each pp rank
    where the schedule was synthesised (see `planner.schedule.schedule_of`). `estimate` is
    what the search predicted, in named parts (seconds and bytes), kept for `show` and
    `compare`; running ignores it.
    """

    format: Literal["planner-plan"] = "planner-plan"
    version: int = PLAN_VERSION
    model: ModelRef
    cluster: ClusterRef
    dp: int = Field(ge=1, le=MOST)
    cp: int = Field(ge=1, le=MOST, default=1)
    tp: int = Field(ge=1, le=MOST)
    pp: int = Field(ge=1, le=MOST)
    vpp: int = Field(ge=1, le=MOST)
    microbatch_size: int = Field(ge=1, le=MOST)
    num_microbatches: int = Field(ge=1, le=MOST)
    schedule: str
    table: tuple[str, ...] = ()
    zero_stage: ZeroStage
    precision: Precision = "model"
    optimizer_on_host: bool = False
    receive_ahead: int = Field(ge=0, le=MOST, default=2)
    recomputed: tuple[ClassRecompute, ...] = ()
    stages: tuple[StagePlan, ...]
    layouts: tuple[ClassLayout, ...]
    estimate: dict[str, Any] = Field(default_factory=dict)

    @field_validator("estimate")
    @classmethod
    def _can_be_shown(cls, estimate: dict[str, Any]) -> dict[str, Any]:
        if estimate:
            _Estimate.model_validate(estimate)
        return estimate

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.dp * self.microbatch_size * self.num_microbatches

    @property
    def stage_to_pp_rank(self) -> tuple[int, ...]:
        """The pp rank that holds each stage."""
        return tuple(stage.pp_rank for stage in self.stages)

    def mesh(self, pp_rank: int) -> ProcessMesh:
        """Return the ranks of a pp rank, with axes dp, cp and tp."""
        tp = next((s.tp for s in self.stages if s.pp_rank == pp_rank and s.tp), self.tp)
        count = self.dp * self.cp * self.tp
        return ProcessMesh(
            axes=("dp", "cp", "tp"),
            shape=(self.dp * self.tp // tp, self.cp, tp),
            ranks=tuple(range(pp_rank * count, (pp_rank + 1) * count)),
        )

    def layout(self, class_index: int, *, axis: str, tp: int) -> ClassLayout | None:
        """Return a class's layout on an axis for stages of this tp degree; None: replicated."""
        if (tp if axis == "tp" else self.cp) == 1:
            return None
        return next(
            (
                layout
                for layout in self.layouts
                if (layout.class_index, layout.axis) == (class_index, axis)
                and (layout.tp or self.tp) == tp
            ),
            None,
        )

    def stage_tp(self, stage_index: int) -> int:
        """The tp degree of a stage."""
        return self.stages[stage_index].tp or self.tp

    def stage_dp(self, stage_index: int) -> int:
        """The dp degree of a stage: all its ranks not spent on cp and tp."""
        return self.dp * self.tp // self.stage_tp(stage_index)

    def stage_microbatch_size(self, stage_index: int) -> int:
        """Samples of one microbatch in one dp replica of a stage."""
        return self.dp * self.microbatch_size // self.stage_dp(stage_index)

    @model_validator(mode="after")
    def _is_of_this_world(self) -> Plan:
        for what, number in (
            ("ranks", self.world_size),
            ("forwards of all stages", self.pp * self.vpp * self.num_microbatches),
        ):
            if number > MOST:
                raise ValueError(f"it asks for {number} {what}; {MOST} are the most")
        return self

    @model_validator(mode="after")
    def _meshes_fit(self) -> Plan:
        tp_of_rank: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            tp = self.stage_tp(index)
            if self.dp * self.tp % tp or self.dp * self.microbatch_size % self.stage_dp(index):
                raise ValueError(
                    f"stage {index} has tp={tp}; it must divide dp*tp={self.dp * self.tp}, and "
                    f"the {self.dp * self.microbatch_size} samples of a microbatch over all "
                    "replicas must divide by the stage's dp"
                )
            if tp_of_rank.setdefault(stage.pp_rank, tp) != tp:
                raise ValueError(
                    f"stage {index} has tp={tp} and another stage of pp rank {stage.pp_rank} has "
                    f"tp={tp_of_rank[stage.pp_rank]}; stages of one pp rank share its mesh"
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
        return self


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises PlanError, in one line, when the file is missing, not JSON, not a plan, of a
    newer version, or inconsistent.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise PlanError(f"no plan file {path}; make one with: planner search MODEL") from None
    except IsADirectoryError:
        raise PlanError(f"{path} is a directory; give the plan's JSON file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise PlanError(f"{path} is not readable JSON ({error}); search again to make it") from None
    if not isinstance(data, dict) or data.get("format") != "planner-plan":
        raise PlanError(f"{path} is not a plan (no format 'planner-plan'); was it made by search?")
    version = data.get("version")
    if not isinstance(version, int) or not 1 <= version <= PLAN_VERSION:
        raise PlanError(
            f"{path} has plan version {version!r}; this planner reads up to {PLAN_VERSION}; "
            "update planner or search again"
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "plan"
        raise PlanError(f"{path} is damaged at {where}: {first['msg']}; search again") from None


def batch_spec(
    graph: ModelGraph,
) -> tuple[tuple[str, str, tuple[int | tuple[int, int], ...]], ...]:
    """Return the batch leaves as (path, dtype, shape); an affine size is (per_sample, fixed)."""
    return tuple(
        (
            t.fqn,
            t.dtype,
            tuple(s if isinstance(s, int) else (s.per_sample, s.fixed) for s in t.shape),
        )
        for t in (graph.tensor[name] for name in graph.batch_inputs)
    )


def validate_model(plan: Plan, graph: ModelGraph) -> None:
    """Raise PlanError when a graph is not of the model that the plan was made for.

    Also when the stages do not hold every block (`Plan` itself checks that none is in two), or a
    layout is of no block class of it.
    """
    if graph.fingerprint != plan.model.fingerprint:
        raise PlanError(
            f"the plan is for {plan.model.name} from {plan.model.file} "
            f"({plan.model.fingerprint[:12]}) and the model given is {graph.name} "
            f"({graph.fingerprint[:12]}); search again for this model, or give the plan's own "
            "(if it is: its forward does not do the same in every process, or a call changed it)"
        )
    if plan.model.inputs != batch_spec(graph):
        raise PlanError(
            "the plan's inputs are not those of the model's batch; the plan is damaged, so search "
            "again"
        )
    num_planned = plan.stages[-1].last_block + 1
    if num_planned != len(graph.blocks):
        raise PlanError(
            f"the plan's stages hold blocks 0..{num_planned - 1} and the model has "
            f"{len(graph.blocks)} blocks; each must be in exactly one stage, so search again"
        )
    for layout in plan.layouts:
        _check_layout(layout, graph)
    for choice in plan.recomputed:
        _program_of(choice.class_index, graph)


def _program_of(class_index: int, graph: ModelGraph) -> Program:
    if class_index >= len(graph.classes):
        raise PlanError(
            f"the plan names block class {class_index} and the model has {len(graph.classes)} "
            "classes; the plan is damaged, so search again"
        )
    return graph.classes[class_index]


def _check_layout(layout: ClassLayout, graph: ModelGraph) -> None:
    """Raise PlanError where a layout is not one of the class that it names."""
    program = _program_of(layout.class_index, graph)
    for what in ("inputs", "params", "outputs"):
        given, has = len(getattr(layout, what)), len(getattr(program, what))
        if given != has:
            raise PlanError(
                f"the plan places {given} {what} of block class {program.name!r} on "
                f"{layout.axis} and it has {has}; the plan is damaged, so search again"
            )
    # On cp the layout is of the program as lowered on tp, which has more ops.
    ops = {op.name: op for op in program.ops}
    for name, sharding in layout.op_shardings.items() if layout.axis == "tp" else ():
        op = ops.get(name)
        if op is None or (len(op.inputs), len(op.outputs)) != (
            len(sharding.inputs),
            len(sharding.outputs),
        ):
            raise PlanError(
                f"the plan splits op {name} of block class {program.name!r} as {sharding} and the "
                "model has no such op; the plan is damaged, so search again"
            )


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically, so a killed run leaves the old file or the new one.

    Raises PlanError when the file can't be written.
    """
    target = Path(path)
    if target.is_dir():
        raise PlanError(f"can't write the plan to {path}: it is a directory; name a file in it")
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    text = json.dumps(plan.model_dump(mode="json"), indent=1) + "\n"
    try:
        if target.exists() and not target.is_file():  # a device, a pipe: not to be replaced
            target.write_text(text)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text)
        os.replace(scratch, target)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise PlanError(
            f"can't write the plan to {path}: {error.strerror}; name a file in a folder you can "
            "write to"
        ) from None
