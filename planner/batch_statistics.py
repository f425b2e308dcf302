"""What computes across the samples of a batch, and so changes when the batch is cut.

A BatchNorm in training normalises by the mean and variance of the samples it sees: under a
plan, those of one microbatch on one dp replica. So a plan that cuts the batch trains a
slightly different model than one device does on the whole batch. Nothing can change that
short of communication between microbatches that run one after the other; the *running*
statistics, which evaluation uses, can be made those of the whole batch (`deferred`,
`planner.runtime.batch_norm`). A contrastive loss compares each sample with each other one of
its batch: under such a plan, with those of its own microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.graph import Affine, Block, ModelGraph, Op, Program, Ref, TensorMeta
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


def pairing_ops(program: Program) -> tuple[Op, ...]:
    """Return the ops that compare samples with each other, as a contrastive loss does.

    That is where two sizes of a tensor that gradients flow through begin to grow with the batch.
    """
    return tuple(
        op
        for op in program.ops
        if any(_pairs_samples(program.tensor[name]) for name in op.outputs)
        and not any(_pairs_samples(program.tensor[name]) for name in op.inputs)
    )


def cut_batch_message(
    graph: ModelGraph, plan: Plan, *, deferred_batch_norm: bool = False
) -> str | None:
    """Return what to tell a user whose plan cuts a batch that the model computes across.

    Whoever asked for deferred statistics knows of BatchNorm.
    """
    num_parts = plan.num_microbatches * plan.dp
    if num_parts == 1:
        return None
    cut = (
        f"the plan cuts a batch of {plan.global_batch} samples into {num_parts} parts "
        f"(dp={plan.dp}, num_microbatches={plan.num_microbatches})"
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
    pairs = [
        f"{op.target.split('.')[1]} in block {block.name}"
        for block in graph.blocks
        for op in pairing_ops(graph.classes[block.class_index])
    ]
    if pairs:
        messages.append(
            f"samples are compared with each other ({_few(pairs)}): {cut}, and each meets only "
            f"the {plan.microbatch_size} of its own, so training differs from one device; "
            "a larger microbatch (--microbatch-size) lessens that"
        )
    return "; ".join(messages) or None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))


def _pairs_samples(meta: TensorMeta) -> bool:
    growing = [s for s in meta.shape if isinstance(s, Affine) and s.per_sample]
    return meta.requires_grad and len(growing) > 1


def deferred(program: Program) -> Program:
    """Return a class's program whose running statistics are those of the last microbatch.

    With a momentum of one, a layer leaves there what it computed; whoever runs the program
    takes it from there. Counts of batches stand still.
    """
    counters = {
        op.inputs[0]
        for op in program.ops
        if op.target == "aten.add_.Tensor" and program.tensor[op.inputs[0]].dtype == "int64"
    }
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
