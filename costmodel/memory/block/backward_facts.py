"""What the backward of each op of a program takes, whatever the model around it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.memory.block.gradients import leaves_gaps, passes_on
from costmodel.memory.ops.kept import Kept
from costmodel.memory.ops.kept_products import has_rows
from costmodel.memory.ops.kernel_scratch import scratch_bytes, unreduced_bytes
from costmodel.memory.ops.saved import HELD_ANYWAY, SavedTensors
from costmodel.memory.ops.storage import Strides, contiguous_strides
from planner.graph import Op, Program
from planner.ops.weight_products import ProductArgs


class Taker(NamedTuple):
    """An input that an op gives a gradient: its bytes, whether it is a parameter and the weight of
    a product, whether the gradient is the op's own or a view of it, perhaps with gaps, and how it
    lies where it is neither.
    """

    name: str
    num_bytes: int
    is_param: bool
    is_weight: bool
    is_same: bool
    has_gaps: bool
    strides: Strides


class Product(NamedTuple):
    """A product by a trained weight, as it is put aside: the inputs that get their gradients
    later, the storages that it waits with and, where it has none in rows, a copy of its input in
    rows; `never_freed` are those that somebody else holds, and the rest is `Aside`'s.
    """

    later: frozenset[str]
    held: tuple[tuple[str, int], ...]
    rows_bytes: int | None
    never_freed: frozenset[str]
    weight_bytes: int
    bias_bytes: int
    adds: bool
    whole_bytes: int
    weight: str


class OpFacts(NamedTuple):
    """An op in a backward: who gets gradients, what its kernel holds only while it runs and how
    much more where gradients are summed or cast, also where its product is put aside, and what
    it is the first to have kept: storages and more.
    """

    op: Op
    takers: tuple[Taker, ...]
    scratch_bytes: int
    unreduced_bytes: int
    aside_unreduced_bytes: int
    kept: tuple[tuple[str, int], ...]
    extra_bytes: int
    product: Product | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFacts:
    """The ops of a program, last first. `outputs` are those that get gradients, with bytes;
    `roots` the storages that inputs and outputs lie in, `strides` how outputs lie; `readers` the
    first op that reads each tensor; `kept` all that autograd keeps, and `first_saver` the first op
    that keeps anything.
    """

    program: Program
    ops: tuple[OpFacts, ...]
    outputs: Mapping[str, int]
    roots: Mapping[str, str]
    strides: Mapping[str, Strides]
    readers: Mapping[str, str]
    kept: Mapping[str, int]
    kept_bytes: int
    first_saver: str | None


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
        kept={one.root: one.num_bytes for kept, _ in saved.by_op.values() for one in kept},
        kept_bytes=saved.num_bytes,
        first_saver=next((op.name for op in program.ops if saved.kept[op.name] != Kept()), None),
    )


def _op_facts(
    op: Op, product: ProductArgs | None, program: Program, saved: SavedTensors
) -> OpFacts:
    tensor = program.tensor
    kept, extra = saved.by_op.get(op.name, ((), 0))
    takers: list[Taker] = []
    aside = None
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
        in_all = without_weights = unreduced_bytes(op, needing, program)
        if product is not None:
            aside = _product(product, program, saved)
            others = [name for name in needing if name not in aside.later]
            without_weights = unreduced_bytes(op, others, program)
    return OpFacts(
        op=op,
        takers=tuple(takers),
        scratch_bytes=scratch,
        unreduced_bytes=in_all,
        aside_unreduced_bytes=without_weights,
        kept=tuple((one.root, one.num_bytes) for one in kept),
        extra_bytes=extra,
        product=aside,
    )


def _product(product: ProductArgs, program: Program, saved: SavedTensors) -> Product:
    tensor, storage = program.tensor, saved.storages.storage
    x, weight, bias, _ = product
    # A product put aside waits with its input as given, or with a copy of it in rows.
    as_given = has_rows(tensor[x.name].shape_at(1), saved.storages.strides[x.name])
    given = [ref.name for ref in (x if as_given else None, weight, bias) if ref is not None]
    roots = dict.fromkeys(storage[name] for name in given)
    return Product(
        later=frozenset(ref.name for ref in (weight, bias) if ref is not None),
        held=tuple((one.root, one.num_bytes) for one in roots if one.kind not in HELD_ANYWAY),
        rows_bytes=None if as_given else tensor[x.name].bytes_at(1),
        never_freed=frozenset(one.root for one in roots),
        weight_bytes=tensor[weight.name].bytes_at(1),
        bias_bytes=0 if bias is None else tensor[bias.name].bytes_at(1),
        adds=tensor[weight.name].kind == "param",
        whole_bytes=storage[weight.name].num_bytes,
        weight=storage[weight.name].root,
    )
