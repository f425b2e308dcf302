"""What a plan that cuts the batch changes in a model that computes across its samples.

A BatchNorm in training normalises by the mean and variance of the samples it sees: under a
plan, those of one part of a microbatch. So a plan that cuts the batch trains a
slightly different model than one device does on the whole batch. Nothing can change that
short of communication between microbatches that run one after the other; the *running*
statistics, which evaluation uses, can be made those of the whole batch (`deferred`,
`planner.runtime.step.batch_norm`). Other things that samples have to do with each other are found
in the graph (`planner.across`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from planner.across import Finding, Kind, across_samples, uncounted
from planner.graph import Block, ModelGraph, Op, Program, Ref
from planner.layout.axes import batch_axes
from planner.plan import Plan

_TARGET = "aten.batch_norm.default"
_RUNNING_MEAN, _RUNNING_VAR, _TRAINING, _MOMENTUM = 3, 4, 5, 6


class BatchStatisticsWarning(UserWarning):
    """A plan cuts the batch of a model that computes across its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """A BatchNorm in training: its module's name, its block, and what it updates.

    `running_mean`, `running_var` and `num_batches_tracked` are tensors of the graph, None
    for a layer without running statistics. `source` is the tensor of the block's class that
    it normalises, [samples, channels, …].
    """

    module: str
    block_index: int
    source: str
    running_mean: str | None
    running_var: str | None
    num_batches_tracked: str | None
    momentum: float


def batch_norms(graph: ModelGraph) -> tuple[BatchNorm, ...]:
    """Return the layers of a model that compute statistics over the batch, in order."""
    return tuple(
        _batch_norm(graph, block, op)
        for block in graph.blocks
        for op in graph.classes[block.class_index].ops
        if _is_training(op)
    )


def cut_batch_messages(
    graph: ModelGraph,
    plan: Plan,
    *,
    deferred_batch_norm: bool = False,
    weighted_loss: bool = False,
    summed_loss: bool = False,
) -> tuple[str, ...]:
    """Return what to tell a user whose plan cuts a batch that the model computes across.

    With `deferred_batch_norm` there is no message on BatchNorm, and with `weighted_loss` none on
    losses that are divided by what a part holds, with `summed_loss` none on those that are sums
    over samples: the user has chosen what to do about them.
    """
    num_parts = plan.num_microbatches * plan.degrees.along("batch")
    if num_parts == 1:
        return ()
    sizes = ", ".join(
        f"{axis.name}={plan.degrees[axis.name]}"
        for axis in batch_axes()
        if axis.name in plan.degrees.sizes
    )
    cut = (
        f"the plan cuts a batch of {plan.global_batch} samples into {num_parts} parts "
        f"({sizes}, num_microbatches={plan.num_microbatches})"
    )
    messages = []
    norms = list(dict.fromkeys(norm.module for norm in batch_norms(graph)))
    if norms and not deferred_batch_norm:
        messages.append(
            f"BatchNorm {_few(norms)}: {cut}, each normalised by the statistics of its own "
            f"{plan.microbatch_size}, so training differs from one device; "
            "planner.apply(..., deferred_batch_norm=True) makes the running statistics those of "
            "the whole batch, a larger microbatch or GroupNorm lessens the rest"
        )
    by_kind: dict[tuple[Kind, int], list[Finding]] = {}
    for finding in uncounted(graph, across_samples(graph)):
        by_kind.setdefault((finding.kind, finding.power), []).append(finding)
    for (kind, power), findings in by_kind.items():
        if kind == "normaliser" and weighted_loss:
            continue
        if (kind, power) == ("sum", 1) and summed_loss:
            continue
        if kind == "repeated" and plan.num_microbatches == 1:
            continue
        what, consequence = _TELL[kind]
        factor = num_parts**power if power > 0 else f"1/{num_parts**-power}"
        consequence = consequence.format(
            each=plan.microbatch_size, factor=factor, steps=plan.num_microbatches
        )
        messages.append(f"{what} ({_few(_places(graph, findings))}): {cut}{consequence}")
    return tuple(messages)


_LARGER = "so training differs from one device; a larger `microbatch_size` lessens that"

_TELL: dict[Kind, tuple[str, str]] = {
    "mixed": (
        "values are computed across samples",
        f", and each part has those of its own {{each}}, {_LARGER}",
    ),
    "pairs": (
        "samples are compared with each other",
        f", and each meets only the {{each}} of its own, {_LARGER}",
    ),
    "normaliser": (
        "the loss is divided by a sum over the batch",
        ", each divided by its own and counted by its samples, so training differs from one "
        "device; planner.apply(..., loss_weight=) counts parts by that sum, for example "
        "planner.count_tokens(...) where it counts labels",
    ),
    "sum": (
        "the loss grows with the number of samples",
        ", whose losses are averaged, so one device's gradients are {factor} times as large; "
        "return the mean over samples (divide by their number), or let parts be summed with "
        'planner.apply(..., loss_weight="sum")',
    ),
    "size": (
        "values depend on the number of samples",
        f", and each part takes {{each}} for it, {_LARGER}",
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
        inside = f" in block{'s' * (len(names) > 1)} {_few(names)}" if all(names) else ""
        user = f", used by {used_by}" if used_by else ""
        places.append(f"{op}{inside}{f' at {line}' if line else ''}{user}")
    return places


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))


def deferred(graph: ModelGraph) -> ModelGraph:
    """Return a model whose running statistics are those of the last microbatch.

    With a momentum of one, a layer leaves there what it computed, and the caller of the
    programs takes it from there. Counts of the layers' batches stand still.
    """
    counters: dict[int, set[str]] = {}
    for norm in batch_norms(graph):
        block = graph.blocks[norm.block_index]
        names = zip(graph.classes[block.class_index].params, block.params, strict=True)
        found = {local for local, name in names if name == norm.num_batches_tracked}
        counters.setdefault(block.class_index, set()).update(found)
    classes = (_deferred(c, counters.get(i, set())) for i, c in enumerate(graph.classes))
    return replace(graph, classes=tuple(classes))


def _deferred(program: Program, counters: Collection[str]) -> Program:
    ops = []
    for op in program.ops:
        if op.target == "aten.add_.Tensor" and op.inputs[0] in counters:
            continue
        if _is_training(op):
            op = replace(op, args=(*op.args[:_MOMENTUM], 1.0, *op.args[_MOMENTUM + 1 :]))
        ops.append(op)
    return replace(program, ops=tuple(ops))


def _is_training(op: Op) -> bool:
    return op.target == _TARGET and bool(op.args[_TRAINING])


def _batch_norm(graph: ModelGraph, block: Block, op: Op) -> BatchNorm:
    program = graph.classes[block.class_index]
    of_model = dict(zip(program.params, block.params, strict=True))

    def tensor_of(position: int) -> str | None:
        arg = op.args[position]
        return of_model.get(arg.name) if isinstance(arg, Ref) else None

    held = [name for name in map(tensor_of, range(1, _RUNNING_VAR + 1)) if name is not None]
    fqns = [graph.tensor[name].fqn for name in held]
    module = fqns[0].rpartition(".")[0] if fqns else f"{block.name}.{op.module}".strip(".")
    counter = f"{module}.num_batches_tracked"
    source = op.args[0]
    assert isinstance(source, Ref)
    return BatchNorm(
        module=module,
        block_index=block.index,
        source=source.name,
        running_mean=tensor_of(_RUNNING_MEAN),
        running_var=tensor_of(_RUNNING_VAR),
        num_batches_tracked=next((n for n in block.params if graph.tensor[n].fqn == counter), None),
        momentum=float(op.args[_MOMENTUM]),  # type: ignore[arg-type]
    )
