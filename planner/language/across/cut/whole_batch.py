"""Batches that stay whole: a plan may not cut what a model computes across, unless accepted.

A plan cuts the batch over microbatches and replicas. What a model computes across its samples
(`planner.language.across`) would then differ from what one process computes, so such plans are
refused until a user accepts it by a name of `planner.language.plan.accepted`. BatchNorm is the
exception that all of the field makes: see `planner.language.across.cut.batch_statistics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.errors import PlanError
from planner.language.across import Finding, across_samples
from planner.language.across.cut.gathers import WholeOps, whole_ops, with_gathers
from planner.language.graph import ModelGraph
from planner.language.graph.mixing import Kind
from planner.language.layout.axes import Degrees, batch_axes
from planner.language.ops.samples.step import BOUND
from planner.language.plan import Plan
from planner.language.plan.accepted import ACCEPTED, LOCAL_SAMPLES


@dataclass(frozen=True, kw_only=True)
class Across:
    """Where a model computes across samples, and a user has not accepted that parts differ."""

    of_microbatches: tuple[Finding, ...]
    """What microbatches would change, one after the other."""
    of_replicas: tuple[Finding, ...]
    """What replicas would change that share one microbatch: other ops run on the whole batch."""

    def __bool__(self) -> bool:
        return bool(self.of_microbatches)

    def changed(self, *, num_microbatches: int, degrees: Degrees) -> tuple[Finding, ...]:
        """Return what so many microbatches on meshes of these degrees change."""
        if num_microbatches > 1:
            return self.of_microbatches
        if degrees.along("batch") == 1:
            return ()
        if degrees.along("data") > degrees.along("batch"):
            # Ranks that share samples have other parts of a sample: no group has the batch alone.
            return tuple(f for f in self.of_microbatches if f.kind != "repeated")
        return self.of_replicas


NOTHING_ACROSS = Across(of_microbatches=(), of_replicas=())


def unaccepted(
    graph: ModelGraph,
    accept: Iterable[str] = (),
    *,
    weighted_loss: bool = False,
) -> Across:
    """Return what changes where a batch is cut, but for what is accepted.

    With `weighted_loss` the user counts parts of a loss that is divided by what a part holds: it is
    right, then.
    """
    accepted = {kind for name in accept for kind in ACCEPTED[name]}

    def left(graph: ModelGraph) -> tuple[Finding, ...]:
        return tuple(
            finding
            for finding in across_samples(graph)
            if finding.kind not in accepted and not (finding.kind == "normaliser" and weighted_loss)
        )

    found = left(graph)
    if not found:
        return NOTHING_ACROSS
    one = run_whole(graph, 2 * BOUND, num_microbatches=1, accept=accept)
    return Across(
        of_microbatches=found,
        # Replicas that run once each move a buffer as often as one process does.
        of_replicas=tuple(f for f in left(one) if f.kind != "repeated"),
    )


def run_whole(
    graph: ModelGraph,
    num_samples: int,
    *,
    num_microbatches: int,
    accept: Iterable[str] = (),
    parts: Sequence[int] = (),
) -> ModelGraph:
    """Return the graph whose ops across samples run on the whole batch, of so many samples.

    The graph itself where there are no such ops or they can't, where the batch has several
    microbatches, and where parts may have local samples. `parts` are the samples of each replica
    (none: equally many).
    """
    if num_microbatches > 1 or LOCAL_SAMPLES in accept:
        return graph
    # (The very graph, by which callers tell: an equal one may have come before.)
    return _on_whole_batch(graph, num_samples, tuple(parts)) if _whole_ops(graph) else graph


def graph_under(graph: ModelGraph, plan: Plan, parts: Sequence[int] = ()) -> ModelGraph:
    """Return the same as a plan runs it, on a batch of these parts (none: a full batch)."""
    return run_whole(
        graph,
        sum(parts) or plan.global_batch,
        num_microbatches=plan.num_microbatches,
        accept=plan.accept,
        parts=parts,
    )


@lru_cache(maxsize=16)
def _on_whole_batch(graph: ModelGraph, num_samples: int, parts: tuple[int, ...]) -> ModelGraph:
    ops = _whole_ops(graph)
    assert ops
    return with_gathers(graph, ops, num_samples, parts)


@lru_cache(maxsize=16)
def _whole_ops(graph: ModelGraph) -> WholeOps | None:
    return whole_ops(graph)


def refuse_cut(
    graph: ModelGraph,
    plan: Plan,
    *,
    accept: Iterable[str] = (),
    weighted_loss: bool = False,
) -> None:
    """Raise PlanError where a plan cuts a batch across which the model computes, and neither it nor
    `accept` accepts what that changes; `weighted_loss` is as in `unaccepted`.
    """
    left = unaccepted(graph, plan.accept, weighted_loss=weighted_loss)
    accepted = {kind for name in accept for kind in ACCEPTED[name]}
    changed = [finding for finding in _changed(left, plan) if finding.kind not in accepted]
    if changed:
        told = "; ".join(
            what + consequence for what, consequence in _all_told(graph, changed, plan)
        )
        raise PlanError(
            f"{cut_spelled(plan)}: {told}; search again for a plan that keeps the batch whole, or "
            f"accept it: {spell_accept(changed)}"
        )


def accepted_messages(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """Return what was accepted of a plan that cuts the batch, and what that makes of it."""
    refused = set(unaccepted(graph, plan.accept).of_microbatches)
    accepted = [f for f in unaccepted(graph).of_microbatches if f not in refused]
    if not cuts_batch(plan):
        return ()
    return tuple(
        f"{what}: {cut_spelled(plan)}{consequence} (accepted)"
        for what, consequence in _all_told(graph, accepted, plan)
    )


def stays_whole(graph: ModelGraph, findings: Sequence[Finding]) -> str:
    """Say that a batch is not cut, and why: what is computed across its samples, and where."""
    return f"the batch stays whole: {_all_named(graph, findings)}"


def one_microbatch(graph: ModelGraph, findings: Sequence[Finding]) -> str:
    """Say that a batch has one microbatch, which replicas may share, and why."""
    return f"the batch is one microbatch: {_all_named(graph, findings)}"


def _all_named(graph: ModelGraph, findings: Sequence[Finding]) -> str:
    return "; ".join(_named(graph, some) for some in _by_kind(findings))


def spell_accept(findings: Iterable[Finding]) -> str:
    """Return what accepts findings, as arguments."""
    kinds = {finding.kind for finding in findings}
    names = [name for name, accepted in ACCEPTED.items() if kinds.intersection(accepted)]
    return " and ".join(f"`accept` {name}" for name in names)


def cuts_batch(plan: Plan) -> bool:
    """Whether a plan cuts the batch."""
    return plan.num_microbatches * plan.batch_parts > 1


def cut_spelled(plan: Plan) -> str:
    """Say into what a plan cuts the batch."""
    sizes = ", ".join(
        f"{axis.name}={plan.degrees[axis.name]}"
        for axis in batch_axes()
        if axis.name in plan.degrees.sizes
    )
    return (
        f"the plan cuts a batch of {plan.global_batch} samples into "
        f"{plan.num_microbatches * plan.batch_parts} parts ({sizes}, "
        f"num_microbatches={plan.num_microbatches})"
    )


def few(names: Sequence[str]) -> str:
    """Spell the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))


def _changed(across: Across, plan: Plan) -> tuple[Finding, ...]:
    meshes = dict.fromkeys(plan.stage_degrees(index) for index in range(len(plan.stages)))
    changed = (
        across.changed(num_microbatches=plan.num_microbatches, degrees=mesh) for mesh in meshes
    )
    return tuple(dict.fromkeys(finding for each in changed for finding in each))


def _by_kind(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Put findings together that are told together."""
    by_kind: dict[Kind, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    return list(by_kind.values())


def _all_told(
    graph: ModelGraph, findings: Iterable[Finding], plan: Plan
) -> Iterator[tuple[str, str]]:
    """Yield what findings of one kind are, and what a plan's cut makes of it."""
    for some in _by_kind(findings):
        consequence = _TELL[some[0].kind][1].format(
            each=plan.microbatch_size, steps=plan.num_microbatches
        )
        yield _named(graph, some), consequence


def _named(graph: ModelGraph, findings: Sequence[Finding]) -> str:
    return f"{_TELL[findings[0].kind][0]} ({few(_places(graph, findings))})"


_DIFFERS = "so training differs from one device"

_TELL: dict[Kind, tuple[str, str]] = {
    "mixed": (
        "values are computed across samples",
        f", and each part has those of its own {{each}}, {_DIFFERS}",
    ),
    "pairs": (
        "samples are compared with each other",
        f", and each meets only the {{each}} of its own, {_DIFFERS}",
    ),
    "normaliser": (
        "the loss is divided by a sum over the batch that follows from parameters or draws",
        ", each divided by its own and counted by its samples, so training differs from one "
        "device; planner.apply(..., loss_weight=) counts parts by that sum, if the batch says it",
    ),
    "size": (
        "values depend on the number of samples",
        f", and each part takes {{each}} for it, {_DIFFERS}",
    ),
    "buffer": (
        "buffers are written from samples",
        ", and every replica and microbatch writes what its own {each} give, so they differ from "
        "one device's",
    ),
    "repeated": (
        "buffers move by numbers that are drawn each time the model runs",
        ", so they move {steps} times a step instead of once",
    ),
    "unknown": (
        "whether these ops compute across samples is not known",
        ", and if they do, training differs from one device; planner verify shows it",
    ),
}
"""By kind of finding: what is so, and what the cut makes of it."""


def _places(graph: ModelGraph, findings: Sequence[Finding]) -> list[str]:
    """Name each op with its line once, and the blocks that have it."""
    blocks: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        key = finding.op, finding.line, finding.used_by
        names = blocks.setdefault(key, [])
        name = graph.blocks[finding.block_index].name if finding.block_index >= 0 else ""
        if name not in names:
            names.append(name)
    places = []
    for (op, line, used_by), names in blocks.items():
        inside = f" in block{'s' * (len(names) > 1)} {few(names)}" if all(names) else ""
        user = f", used by {used_by}" if used_by else ""
        places.append(f"{op}{inside}{f' at {line}' if line else ''}{user}")
    return places
