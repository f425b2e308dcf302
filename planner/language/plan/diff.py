"""What differs between two plans of one model: as a JSON patch, and in parts that people read.

`patch` and `patched` are exact (RFC 6902): the patch of a plan and itself is empty, and the patch
from A to B makes B of A. The other functions say the same by what a plan decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.plan.plan import Plan
from planner.language.plan.replication import Replication

Patch = list[dict[str, Any]]
"""A JSON patch: operations in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that a plan decides, before and after, in words."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Parameters that move alike: the user's names, bytes in all, and who holds them how."""

    names: tuple[str, ...]
    num_bytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A part of the predicted cost by its key in the plan, before and after, in "bytes" or
    "seconds".
    """

    name: str
    unit: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between two plans; empty where they decide the same.

    Attributes:
        decisions: what is decided once for the plan.
        blocks: by run of blocks: pp rank, stage, recomputation, mesh.
        layouts: by block class, axis and its size: ops and parameters.
        parameters: those that other ranks hold, or that are cut otherwise; of a known model.
        costs: the predicted step, its parts, and memory, where both plans have a prediction.
        rest: paths in the file of what else differs.
    """

    decisions: tuple[Change, ...]
    blocks: tuple[Change, ...]
    layouts: tuple[Change, ...]
    parameters: tuple[Moved, ...]
    costs: tuple[Amount, ...]
    rest: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans are the same."""
        return not any(asdict(self).values())


def compared(before: Plan, after: Plan, graph: ModelGraph | None = None) -> Difference:
    """Return what differs between two plans; `graph` is their model's.

    Raises PlanError for plans of different models.
    """
    require_alike(before, after)
    found = Difference(
        decisions=decisions(before, after),
        blocks=blocks(before, after),
        layouts=layouts(before, after),
        parameters=() if graph is None else parameters(before, after, graph),
        costs=costs(before, after),
        rest=(),
    )
    if not found.is_empty:
        return found
    return replace(found, rest=tuple(step["path"] for step in patch(before, after)))


def as_data(found: Difference) -> dict[str, Any]:
    """Return a difference as JSON data."""
    return {"is_empty": found.is_empty, **asdict(found)}


def patch(before: Plan, after: Plan) -> Patch:
    """Return the JSON patch from one plan's file to the other's."""
    import jsonpatch

    made = jsonpatch.make_patch(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return list(made.patch)


def patched(plan: Plan, operations: Patch) -> Plan:
    """Return a plan with a patch applied. Raises PlanError for a patch of another plan."""
    import jsonpatch
    import jsonpointer
    from pydantic import ValidationError

    try:
        data = jsonpatch.apply_patch(plan.model_dump(mode="json"), operations)
        return Plan.model_validate(data)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
        reason = str(error).splitlines()[0]
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    raise PlanError(f"the patch does not fit this plan ({reason}); give the plan it was made from")


def require_alike(before: Plan, after: Plan) -> None:
    """Raise PlanError for plans of different models: nothing of them can be compared."""
    if before.model.fingerprint != after.model.fingerprint:
        raise PlanError(
            f"the plans are for different models, {before.model.name} "
            f"({before.model.fingerprint[:12]}) and {after.model.name} "
            f"({after.model.fingerprint[:12]}); give two plans of one model"
        )


def decisions(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return what is decided once for the whole plan and differs."""
    pairs = zip(_decided(before), _decided(after), strict=True)
    return tuple(
        Change(name=name, before=old, after=new) for (name, old), (_, new) in pairs if old != new
    )


def _decided(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "ranks", str(plan.world_size)
    for axis, size in (*plan.degrees.items(), ("pp", plan.pp), ("vpp", plan.vpp)):
        yield axis, str(size)
    yield "samples of a step", str(plan.global_batch)
    yield "microbatches", str(plan.num_microbatches)
    yield "samples of a microbatch on a replica", str(plan.microbatch_size)
    yield "samples of each replica", plan.shares_spelled
    yield "schedule", plan.schedule
    yield "its job table", " | ".join(plan.table)
    yield "ZeRO stage", str(plan.zero_stage)
    yield "precision", plan.precision
    yield "tables on the host", ", ".join(plan.tables_on_host)
    yield "optimizer", "on the host" if plan.optimizer_on_host else "on the device"
    yield "receives posted ahead", str(plan.receive_ahead)
    yield "kernels", plan.kernels
    yield "beside collectives of a backward", "weight gradients" if plan.makes_beside else "nothing"
    yield "pieces of gathers in a forward", str(plan.gather_pieces)
    yield "logits", f"of {plan.logit_rows} tokens at a time" if plan.logit_rows else "whole"
    yield "priced for", plan.execution
    yield "cluster", f"{plan.cluster.name}, {plan.cluster.devices_per_node} devices per node"


def blocks(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return the runs of blocks for which something else is decided: where they are, what they
    recompute, the sizes of their mesh.
    """
    changed = []
    pairs = zip(_by_block(before), _by_block(after), strict=True)
    for index, (old, new) in enumerate(pairs):
        parts = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        if parts:
            was, now = (", ".join(side) for side in zip(*parts, strict=True))
            changed.append((index, was, now))
    found = []
    # A run of blocks goes on where the next has the next number and the same change.
    for _, run in groupby(enumerate(changed), key=lambda at: (at[1][0] - at[0], *at[1][1:])):
        members = [member for _, member in run]
        (first, was, now), last = members[0], members[-1][0]
        where = f"block {first}" if first == last else f"blocks {first}..{last}"
        found.append(Change(name=where, before=was, after=now))
    return tuple(found)


def _by_block(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield what is decided for each block."""
    for index, stage in enumerate(plan.stages):
        own = " ".join(f"{axis}={size}" for axis, size in plan.stage_degrees(index).items())
        for recompute in stage.recompute_by_block:
            yield (
                f"pp rank {stage.pp_rank}",
                f"stage {index}",
                f"recompute {recompute}",
                "all microbatches recompute" if stage.recompute_last else "all but the last",
                "activations on the host"
                if stage.activations_on_host
                else "activations on the device",
                f"mesh {own}" if stage.own_sizes else "mesh of the plan's sizes",
            )


def layouts(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return the block classes whose ops or parameters lie otherwise, by axis and sizes."""
    old, new = _by_layout(before), _by_layout(after)
    found = []
    for key in dict.fromkeys((*old, *new)):
        if (was := old.get(key)) == (now := new.get(key)):
            continue
        index, axis, degrees = key
        name = f"class {index} on {axis} {degrees[axis]}"
        spelled = _rows_spelled if axis == "ep" else _spelled
        found.append(Change(name=name, before=spelled(was, now), after=spelled(now, was)))
    return tuple(found)


def costs(before: Plan, after: Plan) -> tuple[Amount, ...]:
    """Return what differs of the predicted costs: the step, its parts, the fullest device."""
    old, new = before.estimate, after.estimate
    if not old or not new:
        return ()
    found = [Amount(name="step_s", unit="seconds", before=old["step_s"], after=new["step_s"])]
    # Older files tell other parts, those of the rank that ends last: nothing to compare with.
    if ("bottleneck_pp_rank" in old) == ("bottleneck_pp_rank" in new):
        found += [
            Amount(
                name=name,
                unit="seconds",
                before=old["time"].get(name, 0.0),
                after=new["time"].get(name, 0.0),
            )
            for name in dict.fromkeys((*old["time"], *new["time"]))
        ]
    peaks = old["peak_bytes"], new["peak_bytes"]
    found.append(Amount(name="peak_bytes", unit="bytes", before=peaks[0], after=peaks[1]))
    return tuple(each for each in found if each.before != each.after)


_Layout = tuple[tuple[str, ...], tuple[str, ...]]
"""Of a class on an axis: how each op is placed, and each parameter."""


def _by_layout(plan: Plan) -> dict[tuple[int, str, Degrees], _Layout]:
    return {
        (each.class_index, each.axis, plan.degrees.with_own(each.own_sizes)): (
            tuple(" ".join(op) for op in each.ops),
            tuple(f"{number} {placed}" for number, placed in enumerate(each.params)),
        )
        for each in plan.layouts
    }


def _rows_spelled(layout: _Layout | None, other: _Layout | None) -> str:
    """Say how tokens come to experts."""
    return "rows exchanged" if layout is None else "tokens gathered"


def _spelled(layout: _Layout | None, other: _Layout | None) -> str:
    """Say how many ops and parameters are placed otherwise, and a few of them."""
    if layout is None:
        return "replicated"
    ops = _missing_in(layout[0], other[0] if other else ())
    params = _missing_in(layout[1], other[1] if other else ())
    shown = ", ".join(ops[:3]) + (", ..." if len(ops) > 3 else "")
    said = []
    if ops:
        said.append(f"{len(ops)} op{'s' * (len(ops) > 1)} ({shown})")
    if params:
        said.append(f"{len(params)} parameter{'s' * (len(params) > 1)} otherwise")
    return "; ".join(said) or "-"


def parameters(before: Plan, after: Plan, graph: ModelGraph) -> tuple[Moved, ...]:
    """Return the parameters that other ranks hold, or that are cut otherwise; those with the same
    change together, the most bytes first.
    """
    old, new = _owners(before, graph), _owners(after, graph)
    groups: dict[tuple[str, str], list[str]] = {}
    for name, owner in old.items():
        if owner != new[name]:
            groups.setdefault((owner, new[name]), []).append(name)
    found = [
        Moved(
            names=tuple(graph.tensor[name].fqn for name in names),
            num_bytes=sum(graph.tensor[name].bytes_at(1) for name in names),
            before=was,
            after=now,
        )
        for (was, now), names in groups.items()
    ]
    return tuple(sorted(found, key=lambda moved: -moved.num_bytes))


def _owners(plan: Plan, graph: ModelGraph) -> dict[str, str]:
    """Return, by parameter, the pp ranks that hold it and how it is cut on their meshes."""
    found: dict[str, dict[int, str]] = {}
    for index, stage in enumerate(plan.stages):
        degrees = plan.stage_degrees(index)
        shards = Replication.of(plan, index).shards if plan.zero_stage == 3 else 1
        zero = f", in {shards} shards" if shards > 1 else ""
        for number in stage.blocks:
            block = graph.blocks[number]
            cuts = [
                (axis.name, layout.params)
                for axis in lowered_axes()
                if (layout := plan.layout(block.class_index, axis=axis.name, degrees=degrees))
            ]
            for place, name in enumerate(block.params):
                if graph.tensor[name].kind != "param":
                    continue
                said = [f"{held[place]} on {axis} {degrees[axis]}" for axis, held in cuts
                        if held[place] != "R"]  # fmt: skip
                how = " and ".join(said) or "whole"
                found.setdefault(name, {})[stage.pp_rank] = how + zero
    return {
        name: "; ".join(f"pp rank {rank}: {how}" for rank, how in sorted(by_rank.items()))
        for name, by_rank in found.items()
    }


def _missing_in(these: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [each for each in these if each not in known]
