"""Lowered program → the same with its loss made of what the last product takes, in chunks of rows.

    x -> product -> view, cast -> cross entropy      becomes      x -> cross entropy in chunks

It comes last of all: the layout of the ops decides which rows and which entries of the vocabulary a
rank has, and what it makes of these alone is replaced. Where ranks exchange logits before the loss,
a model hands them on, or anything but views, casts, factors and a tanh lies between, nothing is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

from planner.language.graph import Op, Program, Ref, Symbol, TensorMeta
from planner.language.ops.call import Call, ProductArgs
from planner.language.ops.families.losses.cross_entropy import VOCAB_CROSS_ENTROPY
from planner.language.ops.families.losses.in_chunks import (
    CAST,
    LOSS_IN_CHUNKS,
    LossInChunks,
    Step,
)
from planner.language.ops.families.losses.targets import MEAN, has_plain_targets
from planner.language.ops.families.products.narrow import scaling_of
from planner.language.ops.record import family_of, packet_of

CROSS_ENTROPY = "aten.cross_entropy_loss.default"

LEAST_ROWS = 2048
"""With fewer, the weight's gradient waits for memory: each chunk reads and writes all of it, which
in bf16 are 4 bytes for 2 flop a row. In the time of a byte devices do 300 to 600 flop."""
_TILE = 128
"""Chunks are of whole multiples of it, the rows of a tile of products on GPUs."""

_MAY_LIE_BETWEEN = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous",
    "clone", "alias", "slice",
}  # fmt: skip
"""Ops that keep entries in their order, or take some of the rows."""
_CASTS = {"to", "_to_copy"}
_BY_NUMBERS = {"mul", "div", "add", "sub"}
"""Ops on each entry and a number."""


class _Chain(NamedTuple):
    """From a product to the loss of its results."""

    product: ProductArgs
    """What is multiplied."""
    slices: tuple[Op, ...]
    """Ops that take some of the rows, first to last."""
    ops: frozenset[str]
    """Names of all its ops but the loss."""
    steps: tuple[Step, ...]
    """What is done to logits entry by entry, first to last."""


def with_losses_in_chunks(program: Program, rows: int) -> Program:
    """Return a bound program of one rank whose losses make logits of so many rows at a time; the
    same program where none is of a product alone, or with no rows.
    """
    chains = _chains(program) if rows else {}
    if not chains:
        return program
    gone = frozenset[str]().union(*(chain.ops for chain in chains.values()))
    left_out = {name for op in program.ops if op.name in gone for name in op.outputs}
    tensors = {name: meta for name, meta in program.tensor.items() if name not in left_out}
    ops: list[Op] = []
    for op in program.ops:
        if op.name in chains:
            made, metas = _in_chunks(op, chains[op.name], program, rows)
            ops += made
            tensors |= {meta.name: meta for meta in metas}
        elif op.name not in gone:
            ops.append(op)
    return replace(program, ops=tuple(ops), tensors=tuple(tensors.values()))


def is_of_a_product(program: Program) -> bool:
    """Whether a bound program has a loss of the results of a product alone."""
    return bool(_chains(program))


def rows_of_chunk(program: Program) -> int:
    """Return of how many rows at a time a rank's program had best make its logits; 0 where it makes
    all at once: none is the loss of a product alone, or all rows are too few to be divided.

    Of so many that logits take about as much as the hidden states of all rows.
    """
    found = 0
    for rows, hidden, vocabulary in _sizes(program):
        chunk = max(LEAST_ROWS, ceil(rows * hidden / vocabulary / _TILE) * _TILE)
        if chunk < rows:
            found = max(found, chunk)
    return found


def most_logits(program: Program) -> int:
    """Return how many logits a rank's program has at once for a loss of a product alone."""
    return max((rows * vocabulary for rows, _, vocabulary in _sizes(program)), default=0)


def _sizes(program: Program) -> Iterator[tuple[int, int, int]]:
    """Yield rows, hidden size and a rank's entries of the vocabulary for each such loss."""
    for chain in _chains(program).values():
        x, weight, _, _ = chain.product
        shape = program.tensor[x.name].shape_at(1)
        rows, hidden = prod(shape[:-1]), shape[-1]
        yield rows, hidden, prod(program.tensor[weight.name].shape_at(1)) // hidden


def _chains(program: Program) -> dict[str, _Chain]:
    """Return the chains that end in a loss, by the name of its op."""
    losses = [op for op in program.ops if op.target in (CROSS_ENTROPY, VOCAB_CROSS_ENTROPY)]
    if not losses:
        return {}
    makers = {name: op for op in program.ops for name in op.outputs}
    uses = Counter(name for op in program.ops for name in op.inputs)
    uses.update(program.outputs)
    found = {}
    for loss in losses:
        chain = _chain(loss, program, makers, uses)
        if chain is not None:
            found[loss.name] = chain
    return found


def _chain(loss: Op, program: Program, makers: dict[str, Op], uses: Counter[str]) -> _Chain | None:
    """Walk from a loss back to the product that it is of."""
    tensor = program.tensor
    if loss.target == CROSS_ENTROPY and not has_plain_targets(Call(loss, tensor, 1)):
        return None
    name = loss.inputs[0]
    op = makers.get(name)
    names: set[str] = set()
    slices: list[Op] = []
    steps: list[Step] = []
    # Classes are along dim 1: of more than two dims, a transposition has brought them there.
    if len(tensor[name].shape) != 2:
        if op is None or not _brings_last_to_second(op, program) or uses[name] > 1:
            return None
        names.add(op.name)
        name = op.inputs[0]
        op = makers.get(name)
    classes = tensor[name].shape_at(1)[-1:]
    while op is not None and uses[name] == 1 and tensor[name].shape_at(1)[-1:] == classes:
        taken = family_of(op.target).weight_product
        product = None if taken is None or scaling_of(op) else taken(op)
        if product is not None:
            names.add(op.name)
            found = _Chain(
                product, tuple(reversed(slices)), frozenset(names), tuple(reversed(steps))
            )
            return found if _fits(found, op, program) else None
        if len(op.inputs) != 1:
            return None
        (source,) = op.inputs
        before, after = (tensor[n].shape_at(1) for n in (source, name))
        if (step := _step(op, program)) is not None:
            steps += step
        elif packet_of(op.target) not in _MAY_LIE_BETWEEN:
            return None
        elif prod(before) != prod(after):
            slices.append(op)
        elif before != after and slices:
            return None  # rows of another shape than x has
        names.add(op.name)
        name, op = source, makers.get(source)
    return None


def _step(op: Op, program: Program) -> tuple[Step, ...] | None:
    """Return what an op does to each entry; nothing for a cast to the same dtype, None where it is
    no such op.
    """
    (source,), (made,) = op.inputs, op.outputs
    before, after = (program.tensor[name].dtype for name in (source, made))
    packet = packet_of(op.target)
    if packet in _CASTS:
        return () if before == after else ((CAST, Symbol("dtype", after)),)
    if before != after or op.kwargs or op.args[:1] != (Ref(source),):
        return None
    by_number = packet in _BY_NUMBERS and [type(arg) for arg in op.args[1:]] in ([int], [float])
    return ((op.target, *op.args[1:]),) if by_number or packet == "tanh" else None


def _fits(chain: _Chain, op: Op, program: Program) -> bool:
    """Whether a chain's product, by this op, makes logits of rows, and its slices take rows."""
    tensor = program.tensor
    x, weight, bias, transposed = chain.product
    made, shape = tensor[op.outputs[0]], tensor[weight.name].shape_at(1)
    rank, vocabulary = len(made.shape), made.shape_at(1)[-1]
    return (
        len(shape) == 2
        and shape[0 if transposed else 1] == vocabulary
        and rank == len(tensor[x.name].shape) > 1
        and (bias is None or tensor[bias.name].shape_at(1) == (vocabulary,))
        and {tensor[name].dtype for name in op.inputs} == {made.dtype}
        and all(int(each.args[1]) % rank != rank - 1 for each in chain.slices)  # type: ignore[arg-type]
    )


def _brings_last_to_second(op: Op, program: Program) -> bool:
    """Whether an op brings the last dim of its input to place 1, and leaves the others' order."""
    if packet_of(op.target) not in ("transpose", "permute"):
        return False
    rank = len(program.tensor[op.outputs[0]].shape)
    if packet_of(op.target) == "transpose":
        return rank == 3 and {int(dim) % rank for dim in op.args[1:3]} == {1, 2}  # type: ignore[arg-type]
    dims = tuple(int(dim) % rank for dim in op.args[1])  # type: ignore[arg-type, union-attr]
    return dims == (0, rank - 1, *range(1, rank - 1))


def _in_chunks(
    loss: Op, chain: _Chain, program: Program, rows: int
) -> tuple[list[Op], list[TensorMeta]]:
    """Return the ops that stand for a chain and its loss, and their tensors."""
    call = Call(loss, program.tensor, 1)
    x, weight, bias, transposed = chain.product
    ops: list[Op] = []
    metas: list[TensorMeta] = []
    meta = program.tensor[x.name]
    for op in chain.slices:
        sliced = program.tensor[op.outputs[0]].shape_at(1)
        name = f"{op.name}_of_x"
        meta = replace(
            meta, name=name, shape=(*sliced[:-1], meta.shape_at(1)[-1]), kind="activation"
        )
        source = Ref(metas[-1].name) if metas else x
        ops.append(replace(op, name=name, args=(source, *op.args[1:]), outputs=(name,)))
        metas.append(meta)
    if ops:
        # The loss reads rows side by side.
        name = f"{loss.name}_rows"
        shape = meta.shape_at(1)
        flat = (prod(shape[:-1]), shape[-1])
        args = (Ref(meta.name), flat)
        ops.append(Op(name=name, target="aten.reshape.default", args=args, outputs=(name,)))
        metas.append(replace(meta, name=name, shape=flat))
        x = Ref(name)
    if loss.target == VOCAB_CROSS_ENTROPY:
        _, target, reduction, ignore_index, smoothing, axis = loss.args
    else:
        target, axis = loss.args[1], ""
        reduction = call.arg(3, "reduction", MEAN)
        ignore_index = call.arg(4, "ignore_index", -100)
        smoothing = call.arg(5, "label_smoothing", 0.0)
    of = LossInChunks(
        x=x,
        weight=weight,
        bias=bias,
        target=target,  # type: ignore[arg-type]
        transposed=transposed,
        steps=chain.steps,
        reduction=int(reduction),  # type: ignore[arg-type]
        ignore_index=int(ignore_index),  # type: ignore[arg-type]
        smoothing=float(smoothing),  # type: ignore[arg-type]
        rows=rows,
        axis=str(axis),
    )
    ops.append(replace(loss, target=LOSS_IN_CHUNKS, args=of.args, kwargs=()))
    return ops, metas
