"""What the backward of each op of a program takes, whatever the model around it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.memory.block.gradients import leaves_gaps, passes_on
from costmodel.memory.ops.kernel_scratch import scratch_bytes, unreduced_bytes
from costmodel.memory.ops.saved import HELD_ANYWAY, SavedTensors
from planner.graph import Op, Program
from planner.ops.kernel import Saved
from planner.ops.strides import Strides, contiguous_strides, has_rows
from planner.ops.weight_products import ProductArgs


class Taker(NamedTuple):
    """An input that an op gives a gradient."""

    name: str
    num_bytes: int
    is_param: bool
    is_weight: bool
    """Whether it is the weight of a product."""
    is_same: bool
    """Whether its gradient is the arriving gradient, or a view of it."""
    has_gaps: bool
    """Whether that view has gaps."""
    strides: Strides
    """How its gradient lies, where it is not such a view."""


class Product(NamedTuple):
    """A product by a trained weight, as it is deferred; see `DeferredWeight`."""

    later: frozenset[str]
    """Inputs that get their gradients later: weight and bias."""
    held: tuple[tuple[str, int], ...]
    """(Name, bytes) of the storages it waits with."""
    rows_bytes: int | None
    """Bytes of a copy of its input in rows, where the input does not lie in rows."""
    never_freed: frozenset[str]
    """Storages that outlive the backward."""
    weight_bytes: int
    bias_bytes: int
    adds: bool
    whole_bytes: int
    weight: str


class OpFacts(NamedTuple):
    """An op in a backward."""

    op: Op
    takers: tuple[Taker, ...]
    """Inputs that get gradients."""
    scratch_bytes: int
    """What its kernel holds only while it runs."""
    unreduced_bytes: int
    """And more where gradients are summed over broadcast dims, or cast."""
    deferred_unreduced_bytes: int
    """The same where its weight gradient is deferred."""
    kept: tuple[tuple[str, int], ...]
    """(Name, bytes) of storages that it is the first to have saved: its backward frees them."""
    extra_bytes: int
    """What it saved beside tensors: masks, statistics."""
    product: Product | None
    """The product, if it is one by a trained weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFacts:
    """The ops of a program, last first, and what its backward begins with."""

    program: Program
    ops: tuple[OpFacts, ...]
    outputs: Mapping[str, int]
    """Bytes of the outputs that get gradients."""
    roots: Mapping[str, str]
    """The storage that each input and output lies in."""
    strides: Mapping[str, Strides]
    """How outputs lie."""
    readers: Mapping[str, str]
    """The first op that reads each tensor."""
    kept: Mapping[str, int]
    """Bytes of all storages that autograd keeps."""
    kept_bytes: int
    """All of them, and what ops keep beside."""
    first_saver: str | None
    """The first op that saves anything."""


def backward_facts(
    program: Program, saved: SavedTensors, products: Mapping[str, ProductArgs]
) -> BackwardFacts:
    """Return what the backward of a bound program with those `deferrable_products` goes by."""
    tensor, storage = program.tensor, saved.storages.storage
    edges = (*program.inputs, *program.outputs)
    return BackwardFacts(
        program=program,
        ops=tuple(
            _op_facts(op, products.get(op.name), program, saved) for op in reversed(program.ops)
        ),
        outputs={n: tensor[n].bytes_at(1) for n in program.outputs if tensor[n].requires_grad},
        roots={name: storage[name].root for name in edges},
        strides={name: contiguous_strides(tensor[name].shape_at(1)) for name in program.outputs},
        readers={name: op.name for op in reversed(program.ops) for name in op.inputs},
        kept={
            storage.root: storage.num_bytes for kept, _ in saved.by_op.values() for storage in kept
        },
        kept_bytes=saved.num_bytes,
        first_saver=next((op.name for op in program.ops if saved.kept[op.name] != Saved()), None),
    )


def _op_facts(
    op: Op, product: ProductArgs | None, program: Program, saved: SavedTensors
) -> OpFacts:
    tensor = program.tensor
    kept, extra = saved.by_op.get(op.name, ((), 0))
    takers: list[Taker] = []
    deferred = None
    scratch = in_all = without_weights = 0
    if any(tensor[name].requires_grad for name in op.outputs):
        needing = [name for name in dict.fromkeys(op.inputs) if tensor[name].requires_grad]
        weight = None if product is None else product[1].name
        has_gaps = leaves_gaps(op, program)
        takers = [
            Taker(
                name=name,
                num_bytes=tensor[name].bytes_at(1),
                is_param=tensor[name].kind == "param",
                is_weight=name == weight,
                is_same=passes_on(op, name, program, saved),
                has_gaps=has_gaps,
                strides=contiguous_strides(tensor[name].shape_at(1)),
            )
            for name in needing
        ]
        scratch = scratch_bytes(op, program, saved, forward=False)
        in_all = without_weights = unreduced_bytes(op, needing, program, saved)
        if product is not None:
            deferred = _product(product, program, saved)
            others = [name for name in needing if name not in deferred.later]
            without_weights = unreduced_bytes(op, others, program, saved)
    return OpFacts(
        op=op,
        takers=tuple(takers),
        scratch_bytes=scratch,
        unreduced_bytes=in_all,
        deferred_unreduced_bytes=without_weights,
        kept=tuple((storage.root, storage.num_bytes) for storage in kept),
        extra_bytes=extra,
        product=deferred,
    )


def _product(product: ProductArgs, program: Program, saved: SavedTensors) -> Product:
    tensor, storage = program.tensor, saved.storages.storage
    x, weight, bias, _ = product
    # A product deferred waits with its input as given, or with a copy of it in rows.
    as_given = has_rows(tensor[x.name].shape_at(1), saved.storages.strides[x.name])
    given = [ref.name for ref in (x if as_given else None, weight, bias) if ref is not None]
    roots = dict.fromkeys(storage[name] for name in given)
    return Product(
        later=frozenset(ref.name for ref in (weight, bias) if ref is not None),
        held=tuple(
            (storage.root, storage.num_bytes)
            for storage in roots
            if storage.kind not in HELD_ANYWAY
        ),
        rows_bytes=None if as_given else tensor[x.name].bytes_at(1),
        never_freed=frozenset(storage.root for storage in roots),
        weight_bytes=tensor[weight.name].bytes_at(1),
        bias_bytes=0 if bias is None else tensor[bias.name].bytes_at(1),
        adds=tensor[weight.name].kind == "param",
        whole_bytes=storage[weight.name].num_bytes,
        weight=storage[weight.name].root,
    )
