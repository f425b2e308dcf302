"""The backward of a program, op by op: its highest point, what it makes and what it puts aside.

A gradient is freed once the op that made its tensor has run backward; what autograd kept is
freed by the earliest op that kept it. How gradients share buffers is in
`costmodel.gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from costmodel.gradients import Gradients, leaves_gaps, passes_on, seen_through
from costmodel.kept import Kept
from costmodel.kept_products import has_rows
from costmodel.kernel_scratch import scratch_bytes, unreduced_bytes
from costmodel.saved import HELD_ANYWAY, SavedTensors
from costmodel.storage import contiguous_strides
from planner.graph import Op, Program, Ref
from planner.weight_products import LARGE_BYTES, deferrable_products


class Aside(NamedTuple):
    """A weight gradient put aside in the backward: the storages it waits with, by name, and
    the bytes of the gradients of weight and bias that it will make. `adds` tells whether the
    product can be added to a gradient that is there without being made first; if not, autograd
    makes one of `whole_bytes` for what the weight is a view of: `weight`. `is_begun`: that has
    a gradient by then, of another use.
    """

    held: tuple[tuple[str, int], ...]
    weight_bytes: int
    bias_bytes: int
    adds: bool
    whole_bytes: int
    weight: str
    is_begun: bool = False


class Given(NamedTuple):
    """The gradient of an input: the bytes of its buffer, the output whose gradient has the same
    buffer, if one has, and whether it is a view with gaps. `is_sum`: it was added to one that
    was there before.
    """

    num_bytes: int
    output: str | None
    gaps: bool
    is_sum: bool = False


class BackwardWalk(NamedTuple):
    """The highest point of a backward above its start, where everything saved and the
    gradients of the outputs are alive; the parameters whose gradients it makes; what it
    puts aside, in that order; and the gradients of the inputs.
    """

    rise_bytes: int
    made: frozenset[str]
    aside: tuple[Aside, ...]
    given: Mapping[str, Given]


def backward_walk(
    program: Program,
    saved: SavedTensors,
    *,
    first: bool,
    held: frozenset[str],
    leaves: frozenset[str] = frozenset(),
    split: bool = False,
    wide: int = 1,
    waiting: frozenset[str] = frozenset(),
    adds_products: bool = True,
    results: frozenset[str] = frozenset(),
    staying: frozenset[str] = frozenset(),
    going: frozenset[str] = frozenset(),
    begun: frozenset[str] = frozenset(),
) -> BackwardWalk:
    """Run a program's backward.

    In a `first` backward the gradients of parameters stay, `wide` times as large as the
    parameters; in others they are added to those and let go, and products with a large weight
    add theirs without making it first, if it is as wide and `adds_products`. Those of
    parameters in `waiting` stay to the end in both. `begun`: inputs that have a gradient of
    later blocks, which theirs is added to as soon as it is made. `held`: outputs, and inputs
    begun, whose gradients somebody else holds. `leaves`: inputs that keep their gradients, in
    buffers of their own. `split`: weight gradients are put aside. `results`: storages that a
    call of the block holds until the first op that kept anything has run backward. `staying`:
    outputs that somebody else keeps alive. `going`: inputs that nobody else does.
    """
    tensor, storage = program.tensor, saved.storages.storage
    with_weights = deferrable_products(program)
    products = with_weights if split else {}
    readers = {name: op.name for op in reversed(program.ops) for name in op.inputs}
    grads = Gradients()
    for name in program.outputs:
        if tensor[name].requires_grad:
            grads.allocate(name, program.tensor[name].bytes_at(1))
    given_by = {grads.buffer_of(name)[0]: name for name in grads.of}
    for name in begun:
        grads.allocate(name, program.tensor[name].bytes_at(1))
    for name in held:
        grads.hold(name)
    start = saved.num_bytes + grads.live
    live_saved = saved.num_bytes
    keeps = (op.name for op in program.ops if saved.kept[op.name] != Kept())
    first_saver = next(keeps, None)
    never_freed = {storage[name].root for name in program.inputs if name not in going}
    never_freed |= {storage[name].root for name in staying}
    for x, weight, bias, _ in products.values():
        if _is_held_as_given(x.name, program, saved):
            never_freed.add(storage[x.name].root)
        never_freed.update(storage[ref.name].root for ref in (weight, bias) if ref is not None)
    laid = {name: contiguous_strides(tensor[name].shape_at(1)) for name in program.outputs}
    there: dict[str, int] = {}
    made: set[str] = set()
    reached: set[str] = set()
    aside: list[Aside] = []
    peak = start
    for op in reversed(program.ops):
        arriving = [name for name in op.outputs if name in grads.of]
        needing: list[str] = []
        if arriving:
            product = products.get(op.name)
            later = {ref.name for ref in product[1:3] if isinstance(ref, Ref)} if product else set()
            needing = [
                n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad and n not in later
            ]
            reached.update(needing)
            scratch = scratch_bytes(op, program, saved, forward=False)
            scratch += unreduced_bytes(op, needing, program)
            for name in needing:
                size = program.tensor[name].bytes_at(1)
                is_same = passes_on(op, name, program, saved)
                if tensor[name].kind != "param":
                    shape = tensor[name].shape_at(1)
                    seen = laid.get(arriving[0]) if is_same else None
                    through = None if seen is None else seen_through(op, name, program, seen)
                    if through is not None:
                        grads.share(name, arriving[0], gaps=leaves_gaps(op, program))
                    else:
                        grads.allocate(name, size)
                    laid.setdefault(name, through or contiguous_strides(shape))
                    continue
                made.add(name)
                if name in waiting:
                    there[name] = size
                elif first:
                    there[name] = wide * size
                    scratch += size if wide > 1 and not is_same else 0
                else:
                    product_of = with_weights.get(op.name)
                    is_weight = product_of is not None and product_of[1].name == name
                    adds = is_weight and adds_products and wide == 1 and size >= LARGE_BYTES
                    scratch += 0 if is_same or adds else size
            peak = max(peak, live_saved + grads.live + sum(there.values()) + scratch)
            if product is not None:
                aside.append(_put_aside(op, product, program, saved, grads, given_by))
                if not _is_held_as_given(product[0].name, program, saved):
                    there[f"rows of {op.name}"] = program.tensor[product[0].name].bytes_at(1)
                    peak = max(peak, live_saved + grads.live + sum(there.values()))
            for name in arriving if product is None else ():
                grads.free(name)
        kept, extra = saved.by_op.get(op.name, ((), 0))
        live_saved -= extra + sum(
            s.num_bytes for s in kept if s.root not in never_freed and s.root not in results
        )
        if op.name == first_saver:
            every = {s.root: s.num_bytes for storages, _ in saved.by_op.values() for s in storages}
            live_saved -= sum(every.get(root, 0) for root in results - never_freed)
        beside = live_saved + sum(there.values())
        for name in needing:
            if name not in grads.of:
                continue
            size = program.tensor[name].bytes_at(1)
            before = grads.live
            peak = max(peak, beside + before + grads.add_up(name, size))
            if name in leaves and readers[name] == op.name and not grads.is_own(name):
                peak = max(peak, beside + grads.live + size)
                grads.copy(name, size)
    given = {}
    for name in program.inputs:
        if name in reached:
            buffer, size = grads.buffer_of(name)
            given[name] = Given(size, given_by.get(buffer), name in grads.gaps, name in begun)
    return BackwardWalk(peak - start, frozenset(made), tuple(aside), given)


def _put_aside(
    op: Op,
    product: tuple[Ref, Ref, Ref | None, bool],
    program: Program,
    saved: SavedTensors,
    grads: Gradients,
    given_by: Mapping[int, str],
) -> Aside:
    x, weight, bias, _ = product
    buffer, size = grads.buffer_of(op.outputs[0])
    as_given = _is_held_as_given(x.name, program, saved)
    given = [ref.name for ref in (x if as_given else None, weight, bias) if ref is not None]
    roots = dict.fromkeys(saved.storages.storage[name] for name in given)
    held = [(root.root, root.num_bytes) for root in roots if root.kind not in HELD_ANYWAY]
    if not as_given:
        held.append((f"rows of {op.name}", program.tensor[x.name].bytes_at(1)))
    made_from = saved.storages.storage[weight.name]
    return Aside(
        held=(*held, (f"gradient {given_by.get(buffer, buffer)}", size)),
        weight_bytes=program.tensor[weight.name].bytes_at(1),
        bias_bytes=0 if bias is None else program.tensor[bias.name].bytes_at(1),
        adds=program.tensor[weight.name].kind == "param",
        whole_bytes=made_from.num_bytes,
        weight=made_from.root,
    )


def _is_held_as_given(x: str, program: Program, saved: SavedTensors) -> bool:
    """Whether a product put aside waits with its input; else with a copy of it in rows."""
    return has_rows(program.tensor[x].shape_at(1), saved.storages.strides[x])
