"""What the backward of each op of a program needs, whatever the model around it does.

A block's backward is walked several times (first and later microbatches, weight gradients deferred
or not, other neighbours). What these walks have in common is found here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from costmodel.memory.block.deferred_weights import DeferredWeight
from costmodel.memory.saved import (
    HELD_ANYWAY,
    SavedTensors,
    StorageMap,
    ahead_bytes,
    scratch_bytes,
    unreduced_bytes,
)
from planner.deadline import check_time
from planner.language.graph import Op, Program
from planner.language.layout.placement import Replicate, parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE, collectives
from planner.language.lowering.lowering import ONCE
from planner.language.ops.call import ProductArgs
from planner.language.ops.families.losses.in_chunks import loss_in_chunks
from planner.language.ops.families.lowered import is_view_slice
from planner.language.ops.kernel import Saved
from planner.language.ops.record import family_of, packet_of
from planner.language.ops.strides import Strides, contiguous_strides, has_rows

AT_END = ""
"""In the place of an op: the end of a program's backward."""


class InputGradient(NamedTuple):
    """A gradient that an op's backward makes: that of an input."""

    name: str
    """The input."""
    num_bytes: int
    """Bytes of the gradient."""
    is_param: bool
    """Whether the input is a parameter."""
    is_weight: bool
    """Whether it is the weight of a product, or of a loss of a product in chunks."""
    is_same: bool
    """Whether its gradient is the arriving gradient, or a view of it."""
    has_gaps: bool
    """Whether that view has gaps."""
    strides: Strides
    """How its gradient lies, where it is not such a view."""
    source: str = ""
    """In a fused kernel, the tensor whose gradient it is, where it is that of another."""


class Product(NamedTuple):
    """A product by a trained weight, as it is deferred."""

    inputs: frozenset[str]
    """Inputs that get their gradients later: weight and bias."""
    weight: DeferredWeight
    """Its weight gradient; the gradient of its output and `rows_bytes` are not yet among `held`."""
    rows_bytes: int | None
    """Bytes of a copy of its input in rows, where the input does not lie in rows."""
    never_freed: frozenset[str]
    """Storages that outlive the backward."""


class OpFacts(NamedTuple):
    """An op in a backward."""

    op: Op
    """The op."""
    gradients: tuple[InputGradient, ...]
    """Gradients of its inputs; none where its outputs need none."""
    scratch_bytes: int
    """What its kernel holds only while it runs: temporaries, and gradients before they are summed
    over broadcast dims or cast."""
    deferred_scratch_bytes: int
    """The same where its weight gradient is deferred."""
    ahead_bytes: int
    """The most that its kernels hold before all its gradients are made, those made among them."""
    deferred_ahead_bytes: int
    """The same where its weight gradient is deferred."""
    saved: tuple[tuple[str, int], ...]
    """(Name, bytes) of storages that it is the first to have saved: its backward frees them."""
    extra_bytes: int
    """What it saved beside tensors: masks, statistics."""
    product: Product | None
    """The product, if it is one by a trained weight."""
    remade_bytes: int = 0
    """Of a fused kernel: factors of products that it makes again, for the end of the backward."""
    is_kernel: bool = False
    """Whether it is a fused kernel, which may write over a gradient that it takes."""
    sums_late: bool = False
    """Whether it is a fused kernel that makes again what gradients of parameters are sums of (a
    norm's): the compiler sums these as late as it can, of what the kernel took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFacts:
    """The ops of a program, last first, and what its backward begins with."""

    storages: StorageMap
    """The program, and where its tensors lie."""
    ops: tuple[OpFacts, ...]
    """Its ops, last first."""
    outputs: Mapping[str, int]
    """Bytes of the outputs that get gradients."""
    strides: Mapping[str, Strides]
    """How outputs' gradients lie."""
    readers: Mapping[str, str]
    """The first op that reads each tensor."""
    saved: Mapping[str, int]
    """Bytes of all storages that autograd saved."""
    saved_bytes: int
    """All of them, and what ops save beside tensors."""
    first_saver: str | None
    """The first op that saves anything."""
    results: frozenset[str]
    """Storages that a recomputed block refers to until `first_saver` has run backward."""
    waits: Mapping[str, tuple[str, ...]]
    """Products whose weight gradients are made while an op's collective is under way, by the op, as
    the backward reaches them; by AT_END those that are made when the program's backward has
    ended."""
    is_compiled: bool = False
    """Whether the backward is one graph: all gradients that it makes stay to its end."""


def backward_facts(
    saved: SavedTensors,
    products: Mapping[str, ProductArgs],
    results: frozenset[str] = frozenset(),
    waits: Mapping[str, tuple[str, ...]] | None = None,
    *,
    is_compiled: bool = False,
) -> BackwardFacts:
    """Return the facts of a bound program with those `deferrable_products`; `results` are those of
    `recomputed.Kept`, `waits` has the `products_beside` its collectives. Compiled, all other
    products are made at the end.
    """
    waits = waits or {}
    if is_compiled:
        beside = {name for names in waits.values() for name in names}
        waits = {**waits, AT_END: tuple(name for name in products if name not in beside)}
    storages = saved.storages
    program, tensor = storages.program, storages.program.tensor
    return BackwardFacts(
        storages=storages,
        ops=tuple(_op_facts(op, products.get(op.name), saved) for op in reversed(program.ops)),
        outputs={n: tensor[n].bytes_at(1) for n in program.outputs if tensor[n].requires_grad},
        strides={name: contiguous_strides(tensor[name].shape_at(1)) for name in program.outputs},
        # Written last to first, so that of several readers the first in the forward stays.
        readers={name: op.name for op in reversed(program.ops) for name in op.inputs},
        saved=saved.roots,
        saved_bytes=saved.num_bytes,
        first_saver=next((name for name, mine in saved.saved.items() if mine != Saved()), None),
        results=results,
        waits=waits,
        is_compiled=is_compiled,
    )


def _op_facts(op: Op, args: ProductArgs | None, saved: SavedTensors) -> OpFacts:
    check_time()
    storages, tensor = saved.storages, saved.program.tensor
    first, extra = saved.by_op.get(op.name, ((), 0))
    gradients: tuple[InputGradient, ...] = ()
    product = None
    scratch = deferred_scratch = ahead = deferred_ahead = 0
    if any(tensor[name].requires_grad for name in op.outputs):
        # A table's gradient is rows, which the optimizer's part of the memory has.
        metas = (tensor[name] for name in dict.fromkeys(op.inputs))
        needing = [meta.name for meta in metas if meta.requires_grad and not meta.table]
        # An activation that is read twice (x * x) gets two gradients, which autograd adds up. Those
        # of a parameter are summed anyway.
        reads = [
            (at, name)
            for at, name in enumerate(op.inputs)
            if name in needing and (tensor[name].kind != "param" or op.inputs.index(name) == at)
        ]
        in_chunks = loss_in_chunks(op)
        weight = None if args is None else args[1].name
        if in_chunks is not None:
            weight = in_chunks.weight.name
        has_gaps = leaves_gaps(op, storages.program)
        gradients = tuple(
            InputGradient(
                name=name,
                num_bytes=tensor[name].bytes_at(1),
                is_param=tensor[name].kind == "param",
                is_weight=name == weight,
                is_same=passes_on(op, at, storages),
                has_gaps=has_gaps,
                strides=contiguous_strides(tensor[name].shape_at(1)),
            )
            for at, name in reads
        )
        kernel = scratch_bytes(op, storages, forward=False)
        scratch = deferred_scratch = kernel + unreduced_bytes(op, needing, storages)
        ahead = deferred_ahead = ahead_bytes(op, needing, storages)
        if args is not None:
            product = _product(op, args, storages)
            # The deferred product sums no gradient of its bias here: only the input's is made.
            others = [name for name in needing if name not in product.inputs]
            deferred_scratch = kernel + unreduced_bytes(op, others, storages)
            deferred_ahead = ahead_bytes(op, others, storages)
    return OpFacts(
        op=op,
        gradients=gradients,
        scratch_bytes=scratch,
        deferred_scratch_bytes=deferred_scratch,
        ahead_bytes=ahead,
        deferred_ahead_bytes=deferred_ahead,
        saved=tuple((storage.root, storage.num_bytes) for storage in first),
        extra_bytes=extra,
        product=product,
    )


def _product(op: Op, args: ProductArgs, storages: StorageMap) -> Product:
    tensor, storage = storages.program.tensor, storages.storage
    x, weight, bias, _ = args
    # A deferred product refers to its input as given, or to a copy of it in rows.
    as_given = has_rows(tensor[x.name].shape_at(1), storages.strides[x.name])
    given = [ref.name for ref in (x if as_given else None, weight, bias) if ref is not None]
    held = dict.fromkeys(storage[name] for name in given)
    return Product(
        inputs=frozenset(ref.name for ref in (weight, bias) if ref is not None),
        weight=DeferredWeight(
            held=tuple((s.root, s.num_bytes) for s in held if s.kind not in HELD_ANYWAY),
            weight_bytes=tensor[weight.name].bytes_at(1),
            bias_bytes=0 if bias is None else tensor[bias.name].bytes_at(1),
            adds=tensor[weight.name].kind == "param",
            whole_bytes=storage[weight.name].num_bytes,
            weight=storage[weight.name].root,
            ahead_bytes=ahead_bytes(op, (weight.name,), storages),
        ),
        rows_bytes=None if as_given else tensor[x.name].bytes_at(1),
        never_freed=frozenset(s.root for s in held),
    )


_SUMS = frozenset({"add", "sub", "clone", "contiguous"})
"""Ops whose backward hands the arriving gradient on, if nothing is broadcast or cast; to a second
operand as well where its factor is 1."""


def passes_on(op: Op, at: int, storages: StorageMap) -> bool:
    """Whether the gradient of the tensor that an op reads at this place is the arriving gradient
    itself, or a view of it.
    """
    name, output = op.inputs[at], op.outputs[0]
    # All ranks but the first pass zeros of their own on where a gradient is counted once.
    if len(op.outputs) > 1 or op.target == ONCE:
        return False
    tensor = storages.program.tensor
    source, result = tensor[name], tensor[output]
    same_size = prod(source.shape_at(1)) == prod(result.shape_at(1))
    if op.target == REDISTRIBUTE:
        src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
        # A collective of the backward writes its result to memory of its own. Without one the
        # backward only narrows the gradient, or hands it on.
        if collectives(src, dst, bool(op.args[4]))[1] is not None:
            return False
        is_slice = is_view_slice(Replicate(), src, result.shape_at(1))
        return (same_size or is_slice) and source.dtype == result.dtype
    if packet_of(op.target) == "cat":
        return source.dtype == result.dtype  # its backward narrows: a slice of the gradient
    # Of another size or dtype, the gradient is summed over broadcast dims or cast: a copy.
    if packet_of(op.target) in _SUMS:
        is_scaled = packet_of(op.target) == "sub" or dict(op.kwargs).get("alpha", 1) != 1
        return same_size and source.dtype == result.dtype and not (at and is_scaled)
    # The only entry of a dim (`unbind`, `select`) goes back into a tensor of that dim, by a copy.
    family = family_of(op.target)
    keeps_dims = source.shape_at(1) == result.shape_at(1)
    is_view = family.reshapes or family.dim_order is not None or keeps_dims
    return output in storages.views and same_size and is_view


def leaves_gaps(op: Op, program: Program) -> bool:
    """Whether the gradient that an op passes on is a view with gaps: a slice of a `cat`'s."""
    if packet_of(op.target) != "cat":
        return False
    shape = program.tensor[op.outputs[0]].shape_at(1)
    dim = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)
    # A slice along the first dim that is longer than 1 is dense; along a later dim, the rows of the
    # other parts lie between its own.
    return prod(shape[: int(dim) % len(shape)]) > 1  # type: ignore[arg-type]
