"""What a plan can use, by name: the list that every emitter is held to.

A feature accounts for fields of a plan and says, in words, what a plan uses of it. A field that no
feature accounts for would be left out of emitted files in silence: a test holds the list complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.language.layout.axes import degree_names
from planner.language.plan import Plan, low_dtype
from planner.language.schedule.placements import loop_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A decision that a plan may hold."""

    name: str
    """As emitters and messages call it."""
    fields: tuple[str, ...]
    """Fields of `Plan`, `StagePlan` and `ModelRef` that it accounts for."""
    used: Callable[[Plan], str]
    """What a plan uses of it, in words; empty: nothing that a system must be told."""


WHOLE_BATCH = "whole-batch"
"""The feature of ops that compute across the samples of all replicas."""

DECIDES_NOTHING = frozenset(
    {
        *("format", "version", "model", "cluster", "estimate", "execution", "degrees"),
        *("name", "file", "fingerprint", "inputs", "batch_tree"),
    }
)
"""Fields that say what a plan is for. Sizes in `degrees` are a feature each, by their axis."""


def plan_features() -> tuple[Feature, ...]:
    """Return every feature, in the order in which messages name them."""
    return tuple(_size(axis) for axis in degree_names()) + _OTHERS


def used_features(plan: Plan) -> dict[str, str]:
    """Return the features that a plan uses, with what it uses of each."""
    found = ((feature.name, feature.used(plan)) for feature in plan_features())
    return {name: used for name, used in found if used}


def _size(axis: str) -> Feature:
    def used(plan: Plan) -> str:
        size = plan.degrees[axis]
        return f"{axis}={size}" if size > 1 else ""

    return Feature(name=axis, fields=(), used=used)


def _cuts(plan: Plan) -> str:
    counts = ",".join(str(len(stage.blocks)) for stage in plan.stages)
    return f"stages of {counts} blocks" if len(plan.stages) > 1 else ""


def _placement(plan: Plan) -> str:
    if plan.stage_to_pp_rank == loop_placement(plan.pp, plan.vpp):
        return ""
    return f"stages on pp ranks {_joined(plan.stage_to_pp_rank)}"


def _schedule(plan: Plan) -> str:
    return f"schedule {plan.schedule}" if plan.pp > 1 else ""


def _recompute(plan: Plan) -> str:
    kinds = [stage.recompute_spelled.replace(", ", " + ") for stage in plan.stages]
    if set(kinds) == {"none"}:
        return ""
    return f"recompute {kinds[0] if len(set(kinds)) == 1 else _joined(kinds)}"


def _recompute_last(plan: Plan) -> str:
    kept = [
        at
        for at, stage in enumerate(plan.stages)
        if stage.is_recomputed and not stage.recompute_last
    ]
    return f"stages {_joined(kept)} keep the last microbatch" if kept else ""


def _on_host(plan: Plan) -> str:
    stages = [at for at, stage in enumerate(plan.stages) if stage.activations_on_host]
    return f"activations of stages {_joined(stages)} on the host" if stages else ""


def _own_meshes(plan: Plan) -> str:
    own = [at for at, stage in enumerate(plan.stages) if stage.own_sizes]
    return f"stages {_joined(own)} have meshes of their own" if own else ""


def _device_groups(plan: Plan) -> str:
    groups = plan.device_groups
    return f"pp ranks on devices of {_joined(groups)}" if any(groups) else ""


def _shares(plan: Plan) -> str:
    return f"replicas of {plan.shares_spelled} samples of a microbatch" if plan.shares else ""


def _layouts(plan: Plan) -> str:
    # (How tokens come to experts over ep is every system's own.)
    of_ops = {layout.axis for layout in plan.layouts if layout.axis != "ep"}
    axes = sorted(axis for axis in of_ops if plan.degrees[axis] > 1)
    return f"placements of ops on {_joined(axes)}" if axes else ""


def _joined(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


_OTHERS = (
    Feature(
        name="microbatches",
        fields=("microbatch_size", "num_microbatches"),
        used=lambda plan: f"{plan.num_microbatches} microbatches of {plan.microbatch_size}",
    ),
    Feature(
        name="buckets",
        fields=("buckets",),
        used=lambda plan: (
            f"batches of {1 + len(plan.model.buckets)} shapes" if plan.model.buckets else ""
        ),
    ),
    Feature(
        name="units",
        fields=("unit",),
        used=lambda plan: (
            "" if plan.unit.is_sample else f"samples that belong together in {plan.unit.spelled}"
        ),
    ),
    Feature(name="pp", fields=("pp",), used=lambda plan: f"pp={plan.pp}" if plan.pp > 1 else ""),
    Feature(
        name="vpp", fields=("vpp",), used=lambda plan: f"vpp={plan.vpp}" if plan.vpp > 1 else ""
    ),
    Feature(name="cuts", fields=("stages", "first_block", "last_block"), used=_cuts),
    Feature(name="stage-placement", fields=("pp_rank",), used=_placement),
    Feature(name="schedule", fields=("schedule", "table"), used=_schedule),
    Feature(
        name="zero",
        fields=("zero_stage",),
        used=lambda plan: f"ZeRO {plan.zero_stage}" if plan.zero_stage else "",
    ),
    Feature(
        name="precision",
        fields=("precision",),
        used=lambda plan: (
            f"{plan.precision} with fp32 master weights"
            if low_dtype(plan.precision)
            else "the model's dtypes"
        ),
    ),
    Feature(
        name="recompute", fields=("recompute", "recompute_blocks", "recomputed"), used=_recompute
    ),
    Feature(name="recompute-last", fields=("recompute_last",), used=_recompute_last),
    Feature(
        name="optimizer-on-host",
        fields=("optimizer_on_host",),
        used=lambda plan: "the optimizer on the host" if plan.optimizer_on_host else "",
    ),
    Feature(
        name="tables-on-host",
        fields=("tables_on_host",),
        used=lambda plan: "tables on the host" if plan.tables_on_host else "",
    ),
    Feature(name="activations-on-host", fields=("activations_on_host",), used=_on_host),
    Feature(name="shares", fields=("shares",), used=_shares),
    Feature(name="device-groups", fields=("device_group",), used=_device_groups),
    Feature(name="own-meshes", fields=("own_sizes",), used=_own_meshes),
    Feature(name="layouts", fields=("layouts",), used=_layouts),
    # What of it a plan uses is known with its model's graph (`planner.emit.emitter`).
    Feature(name=WHOLE_BATCH, fields=("accept",), used=lambda plan: ""),
    # How early this project's runtime posts receives, how it runs blocks, beside which of their
    # collectives, and of how many tokens it has logits. Other systems have
    # their own way; the results are the same, so nothing is to be told.
    Feature(name="receive-ahead", fields=("receive_ahead",), used=lambda plan: ""),
    Feature(name="kernels", fields=("kernels",), used=lambda plan: ""),
    Feature(name="overlap", fields=("overlap", "gather_pieces"), used=lambda plan: ""),
    Feature(name="logits", fields=("logit_rows",), used=lambda plan: ""),
)
