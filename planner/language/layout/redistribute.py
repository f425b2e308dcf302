"""Redistribution on one mesh axis: which collectives change one placement into another.

Gradients follow the values: the gradient of a Replicate value is Replicate, of a Shard(d)
value Shard(d), of a Partial value Replicate. An op that runs on shards leaves the gradient
of each Replicate input as a sum over ranks still to be taken (Partial), so a
redistribution to Replicate says with `grad_partial` which gradient it will be given.

    from   to     forward          backward
    R      R      -                all-reduce if grad_partial
    R      S(d)   local slice      all-gather
    R      P      first rank only  -
    S(d)   R      all-gather       reduce-scatter if grad_partial, else local slice
    S(a)   S(b)   all-to-all       all-to-all
    S(d)   P      zeros around     local slice
    P      R      all-reduce       all-reduce if grad_partial
    P      S(d)   reduce-scatter   all-gather
    O      R      all-reduce       -             (priced only: of numbers of rows, in templates)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from planner.language.graph import Arg, Op, Ref, TensorMeta
from planner.language.layout.placement import (
    Own,
    Partial,
    Placement,
    Replicate,
    Shard,
    parse_placement,
)
from planner.units import DTYPE_BYTES

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

REDISTRIBUTE = "planner.redistribute"
"""Target of the op; args (Ref, axis name, source, destination, grad_partial)."""

DEAL_RUNS = "planner.deal_runs"
"""Target of the op that tells ranks how many rows they will be sent; args (Ref of where each
expert's run of rows ends, axis, ranks). It gives the rows that go to and come from each expert's
rank [2, ranks, experts / ranks], on the host, and where runs of this rank's own experts end."""

EXCHANGE_ROWS = "planner.exchange_rows"
"""Target of the op that sends rows to the ranks of their experts, or back; args (Ref of rows, Ref
of what `DEAL_RUNS` gives, axis, back)."""

GATHER_ROWS = "planner.gather_rows"
"""Target of the op that brings the tokens of all ranks to each, which takes a copy for each of its
experts; args (Ref of rows, Ref of their experts, axis, ranks, number of experts, whether the copies
of an expert stay in order). It gives the copies, their order, where runs of own experts end, and
the numbers of tokens of the ranks, on the host."""

SCATTER_ROWS = "planner.scatter_rows"
"""Target of the op that sums copies by token, over all ranks; args (Ref of copies, Ref of their
order, Ref of weights or None, Ref of the numbers of tokens, copies of a token, axis)."""

EXCHANGED_EMBEDDING = "planner.exchanged_embedding"
"""Target of the lookup in a table that is cut by rows, each rank for its own samples; args (Ref of
the table, Ref of indices, padding, axis, ranks)."""

GATHER_SAMPLES = "planner.gather_samples.default"
"""Target of the op that puts the rows of all replicas together
(`planner.language.across.cut.gathers`); args (Ref, the axes, dim, segments, samples of each
replica: none where all have equally many)."""

OWN_SAMPLES = "planner.own_samples.default"
"""Target of the op that takes a replica's own rows of all; args (Ref, the axes, dim, samples of
each replica)."""

_THERE_AND_BACK = (EXCHANGE_ROWS, EXCHANGED_EMBEDDING, GATHER_ROWS, SCATTER_ROWS)


def goes_back(op: Op, tensor: Mapping[str, TensorMeta]) -> bool:
    """Whether gradients go the same way as what an op of ours sends, back."""
    is_gather = op.target == GATHER_SAMPLES
    return op.target in _THERE_AND_BACK or (is_gather and tensor[op.inputs[0]].requires_grad)


def replicas_of(op: Op, tensor: Mapping[str, TensorMeta]) -> int:
    """Return how many replicas put their rows together in a `GATHER_SAMPLES` of a bound program."""
    own, all_of = (tensor[name].numel_at(1) for name in (op.inputs[0], op.outputs[0]))
    return max(1, all_of // max(1, own))


def collectives(
    src: Placement, dst: Placement, grad_partial: bool = False
) -> tuple[CollectiveKind | None, CollectiveKind | None]:
    """Return the collectives of the forward and of the backward pass; None is local work."""
    if isinstance(dst, Replicate):
        if isinstance(src, Shard):
            return "all_gather", "reduce_scatter" if grad_partial else None
        if isinstance(src, Own):  # a few numbers, which ranks tell each other
            return "all_reduce", None
        forward: CollectiveKind | None = "all_reduce" if isinstance(src, Partial) else None
        return forward, "all_reduce" if grad_partial else None
    if isinstance(dst, Shard):
        if isinstance(src, Shard):
            if src == dst:
                return None, None
            # Pieces of other segments of the same dim: gathered, then cut again.
            return ("all_gather",) * 2 if src.dim == dst.dim else ("all_to_all",) * 2
        return ("reduce_scatter" if isinstance(src, Partial) else None), "all_gather"
    return None, None


def payload_bytes(tensor: TensorMeta) -> int:
    """Return the bytes of the FULL tensor, whichever placements meet.

    That is what is reduced by an all-reduce, what a reduce-scatter starts from, what an
    all-gather ends with: the size of these. That of an all-to-all is what each rank has
    (nccl-tests, doc/PERFORMANCE.md). The tensor's sizes must be numbers.
    """
    return tensor.bytes_at(1)


def redistribute_op(
    source: str, target: str, *, axis: str, src: Placement, dst: Placement, grad_partial: bool
) -> Op:
    """Return the op that makes `target`, placed `dst`, of `source`, placed `src`."""
    args: tuple[Arg, ...] = (Ref(source), axis, str(src), str(dst), grad_partial)
    return Op(name=target, target=REDISTRIBUTE, args=args, outputs=(target,))


def op_collectives(
    op: Op, tensor: dict[str, TensorMeta], axis_size: int
) -> tuple[tuple[CollectiveKind | None, CollectiveKind | None], int]:
    """Return a redistribute op's (forward, backward) collectives and its payload in bytes.

    `tensor` holds the LOCAL metas of a lowered program.
    """
    _, _, src, dst, grad_partial = op.args
    source, target = parse_placement(str(src)), parse_placement(str(dst))
    local = tensor[op.outputs[0]]
    kinds = collectives(source, target, bool(grad_partial))
    # The output is local; the payload is the full tensor, of an all-to-all what a rank has.
    is_part = isinstance(target, Shard) and "all_to_all" not in kinds
    numel = local.numel_at(1) * (axis_size if is_part else 1)
    return kinds, numel * DTYPE_BYTES[local.dtype]


def _of_all_tokens(op: Op, tensor: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Return the bytes of the tokens of all ranks of a gather or scatter, and of what is told of
    each: its experts' numbers, or weights (which are none where it has none).
    """
    if op.target == GATHER_ROWS:
        ranks = int(op.args[3])  # type: ignore[arg-type]
        return tuple(ranks * tensor[name].bytes_at(1) for name in op.inputs)  # type: ignore[return-value]
    _, _, *weights, tokens = op.inputs
    ranks = tensor[tokens].shape_at(1)[0]
    told = sum(tensor[name].bytes_at(1) for name in weights)
    return ranks * tensor[op.outputs[0]].bytes_at(1), ranks * told


def inner_collectives(
    op: Op, tensor: dict[str, TensorMeta]
) -> tuple[tuple[CollectiveKind, int], ...]:
    """Return (kind, payload bytes) of the collectives inside an op of ours.

    All count as forward, though the last of a log-softmax is its backward's. `tensor` holds
    the LOCAL metas. Other ops have none.
    """
    if op.target == "planner.divide_by_count":
        return (("all_reduce", DTYPE_BYTES["int64"]),)
    if op.target == "planner.cross_entropy_in_chunks":
        x, loss = tensor[op.inputs[0]], tensor[op.outputs[0]]
        size = x.numel_at(1) // x.shape_at(1)[-1]
        size *= max(DTYPE_BYTES[loss.dtype], DTYPE_BYTES["float32"])
        # Of all chunks together, as below.
        return (("all_reduce", size), ("all_reduce", 3 * size))
    if op.target in ("planner.vocab_cross_entropy", "planner.sized_vocab_cross_entropy"):
        logits = tensor[op.inputs[0]]
        # Per sample the largest logit, then three sums, each in at least fp32.
        shape = logits.shape_at(1)
        samples = logits.numel_at(1) // shape[min(1, len(shape) - 1)]
        size = samples * max(DTYPE_BYTES[logits.dtype], DTYPE_BYTES["float32"])
        return (("all_reduce", size), ("all_reduce", 3 * size))
    if op.target == DEAL_RUNS:
        return (("all_to_all", tensor[op.inputs[0]].bytes_at(1)),)
    if op.target == EXCHANGE_ROWS:
        # What a rank gets is never less than what it sends where it waits for the fullest.
        return (("all_to_all", max(tensor[n].bytes_at(1) for n in (op.inputs[0], *op.outputs))),)
    if op.target in (GATHER_ROWS, SCATTER_ROWS):
        whole, small = _of_all_tokens(op, tensor)
        is_there = op.target == GATHER_ROWS
        # (At last the tokens, whose gradients come back.)
        return (("all_gather", small), ("all_gather" if is_there else "reduce_scatter", whole))
    if op.target == GATHER_SAMPLES:
        whole = tensor[op.outputs[0]].bytes_at(1)
        return (("all_gather", whole),) if replicas_of(op, tensor) > 1 else ()
    if op.target == EXCHANGED_EMBEDDING:
        # Numbers there, rows back; as if ranks held equally many of those asked for.
        return tuple(
            ("all_to_all", tensor[name].bytes_at(1)) for name in (op.inputs[1], op.outputs[0])
        )
    if op.target == "planner.vocab_log_softmax":
        meta = tensor[op.outputs[0]]
        size = meta.bytes_at(1) // max(1, meta.shape_at(1)[int(op.args[1])])  # type: ignore[arg-type]
        # The largest entry, the sum of exponentials, and that sum's gradient.
        return (("all_reduce", size),) * 3
    if op.target == "planner.batch_norm_by_channel":
        running = tensor[op.inputs[-1]]
        return (("all_gather", 2 * running.bytes_at(1)),)
    return ()
