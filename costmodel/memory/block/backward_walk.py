"""The backward of a program, op by op: its highest point, what it makes and what it puts aside.

A gradient is freed once the op that made its tensor has run backward; what autograd kept is
freed by the earliest op that kept it. How gradients share buffers is in
`costmodel.memory.block.gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from costmodel.memory.block.backward_facts import BackwardFacts, Product, Taker
from costmodel.memory.block.gradients import Gradients, seen_through
from planner.graph import Op
from planner.ops.weight_products import LARGE_BYTES


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
    facts: BackwardFacts,
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
    program = facts.program
    grads = Gradients()
    for name, size in facts.outputs.items():
        grads.allocate(name, size)
    given_by = {grads.buffer_of(name)[0]: name for name in grads.of}
    for name in begun:
        grads.allocate(name, program.tensor[name].bytes_at(1))
    for name in held:
        grads.hold(name)
    live_saved = facts.kept_bytes
    start = live_saved + grads.live
    never_freed = {facts.roots[name] for name in program.inputs if name not in going}
    never_freed |= {facts.roots[name] for name in staying}
    if split:
        never_freed.update(*(one.product.never_freed for one in facts.ops if one.product))
    laid = dict(facts.strides)
    there: dict[str, int] = {}
    there_bytes = 0
    made: set[str] = set()
    reached: set[str] = set()
    aside: list[Aside] = []
    peak = start
    for one in facts.ops:
        op = one.op
        arriving = [name for name in op.outputs if name in grads.of]
        takers: Sequence[Taker] = ()
        if arriving:
            product = one.product if split else None
            takers, scratch = one.takers, one.scratch_bytes + one.unreduced_bytes
            if product is not None:
                takers = [taker for taker in takers if taker.name not in product.later]
                scratch = one.scratch_bytes + one.aside_unreduced_bytes
            for name, size, is_param, is_weight, is_same, has_gaps, strides in takers:
                reached.add(name)
                if not is_param:
                    seen = laid.get(arriving[0]) if is_same else None
                    through = None if seen is None else seen_through(op, name, program, seen)
                    if through is not None:
                        grads.share(name, arriving[0], gaps=has_gaps)
                    else:
                        grads.allocate(name, size)
                    laid.setdefault(name, through or strides)
                    continue
                made.add(name)
                if name in waiting or first:
                    kept = size if name in waiting else wide * size
                    there_bytes += kept - there.get(name, 0)
                    there[name] = kept
                    scratch += size if name not in waiting and wide > 1 and not is_same else 0
                else:
                    adds = is_weight and adds_products and wide == 1 and size >= LARGE_BYTES
                    scratch += 0 if is_same or adds else size
            peak = max(peak, live_saved + grads.live + there_bytes + scratch)
            if product is not None:
                aside.append(_put_aside(op, product, grads, given_by))
                if product.rows_bytes is not None:
                    there_bytes += product.rows_bytes
                    peak = max(peak, live_saved + grads.live + there_bytes)
            else:
                for name in arriving:
                    grads.free(name)
        live_saved -= one.extra_bytes + sum(
            size for root, size in one.kept if root not in never_freed and root not in results
        )
        if op.name == facts.first_saver:
            live_saved -= sum(facts.kept.get(root, 0) for root in results - never_freed)
        beside = live_saved + there_bytes
        for taker in takers:
            name, size = taker.name, taker.num_bytes
            if name not in grads.of:
                continue
            before = grads.live
            peak = max(peak, beside + before + grads.add_up(name, size))
            if name in leaves and facts.readers[name] == op.name and not grads.is_own(name):
                peak = max(peak, beside + grads.live + size)
                grads.copy(name, size)
    given = {}
    for name in program.inputs:
        if name in reached:
            buffer, size = grads.buffer_of(name)
            given[name] = Given(size, given_by.get(buffer), name in grads.gaps, name in begun)
    return BackwardWalk(peak - start, frozenset(made), tuple(aside), given)


def _put_aside(op: Op, product: Product, grads: Gradients, given_by: Mapping[int, str]) -> Aside:
    buffer, size = grads.buffer_of(op.outputs[0])
    held = product.held
    if product.rows_bytes is not None:
        held += ((f"rows of {op.name}", product.rows_bytes),)
    return Aside(
        held=(*held, (f"gradient {given_by.get(buffer, buffer)}", size)),
        weight_bytes=product.weight_bytes,
        bias_bytes=product.bias_bytes,
        adds=product.adds,
        whole_bytes=product.whole_bytes,
        weight=product.weight,
    )
