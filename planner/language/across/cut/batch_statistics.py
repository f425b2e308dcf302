"""What a plan that cuts the batch changes in a model with BatchNorm.

A BatchNorm in training normalises by the mean and variance of the samples it sees: under a
plan, those of one part of a microbatch. So a plan that cuts the batch trains a
slightly different model than one device does on the whole batch. Nothing can change that
short of communication between microbatches that run one after the other; the *running*
statistics, which evaluation uses, can be made those of the whole batch (`deferred`,
`planner.runtime.step.batch_norm`). Other things that samples have to do with each other are
refused (`planner.language.across.cut.whole_batch`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from planner.language.across.cut.whole_batch import cut_spelled, cuts_batch, few
from planner.language.graph import Block, ModelGraph, Op, Program, Ref
from planner.language.plan import Plan

_TARGET = "aten.batch_norm.default"
_COUNT = "aten.add_.Tensor"
_ON_SHARDS = "planner.batch_norm_by_channel"
_RUNNING_MEAN, _RUNNING_VAR, _TRAINING, _MOMENTUM = 3, 4, 5, 6
MOMENTUM_ARGUMENT = _MOMENTUM
"""Which argument of a BatchNorm's op its momentum is, on shards too."""

CUMULATIVE = -1.0
"""The momentum that stands for none: running statistics are means over all steps, so a step moves
them by one over its number, which the layer counts in a buffer (`counters`).
"""


class BatchStatisticsWarning(UserWarning):
    """A plan cuts the batch of a model whose BatchNorms normalise by it."""


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


def batch_norm_messages(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """Return what to tell a user whose plan cuts the batch of a model with BatchNorm in training;
    `deferred_batch_norm` answers it.
    """
    norms = list(dict.fromkeys(norm.module for norm in batch_norms(graph)))
    if not norms or not cuts_batch(plan):
        return ()
    return (
        f"BatchNorm {few(norms)}: {cut_spelled(plan)}, each normalised by the statistics of its "
        f"own {plan.microbatch_size}, so training differs from one device; "
        "planner.apply(..., deferred_batch_norm=True) makes the running statistics those of "
        "the whole batch, a larger microbatch or GroupNorm lessens the rest",
    )


def deferred(graph: ModelGraph) -> ModelGraph:
    """Return a graph whose running statistics are those of the last microbatch.

    With a momentum of one, a layer leaves there what it computed, and the caller of the
    programs takes it from there. The layers' counts of batches stand still.
    """
    counters: dict[int, set[str]] = {}
    for norm in batch_norms(graph):
        if norm.num_batches_tracked is not None:
            block = graph.blocks[norm.block_index]
            params = graph.classes[block.class_index].params
            name = params[block.params.index(norm.num_batches_tracked)]
            counters.setdefault(block.class_index, set()).add(name)
    return replace(
        graph,
        classes=tuple(
            _deferred(program, counters.get(index, set()))
            for index, program in enumerate(graph.classes)
        ),
    )


def _deferred(program: Program, counters: Set[str]) -> Program:
    ops = []
    for op in program.ops:
        if op.target == _COUNT and op.inputs[0] in counters:
            continue
        if _is_training(op):
            op = replace(op, args=(*op.args[:_MOMENTUM], 1.0, *op.args[_MOMENTUM + 1 :]))
        ops.append(op)
    return replace(program, ops=tuple(ops))


def counters(program: Program) -> dict[str, str]:
    """Return, by the name of each op of a cumulative BatchNorm, the buffer that counts its steps.

    A layer counts a step before it moves its statistics.
    """
    found = {}
    counted: dict[str, str] = {}
    for op in program.ops:
        if op.target == _COUNT and op.inputs[0] in program.params:
            counted[op.module] = op.inputs[0]
        elif op.target in (_TARGET, _ON_SHARDS) and op.args[_MOMENTUM] == CUMULATIVE:
            found[op.name] = counted[op.module]
    return found


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
