"""Memory a program needs beyond what it keeps: the highest point inside forward and backward.

Forward and backward are walked op by op. A forward value is freed after its last reader
unless autograd keeps it; a gradient is freed once the op that made its tensor has run
backward; what autograd kept is freed by the earliest op that kept it. How gradients share
buffers is in `costmodel.gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from costmodel.gradients import Gradients, leaves_gaps, passes_on, seen_through
from costmodel.plain_attention import backward_scratch, forward_scratch, is_plain
from costmodel.saved import HELD_ANYWAY, Kept, SavedTensors, has_rows
from costmodel.storage import base_name, contiguous_strides
from planner.graph import Op, Program, Ref
from planner.placement import Placement, Shard, parse_placement
from planner.redistribute import REDISTRIBUTE, collectives
from planner.units import DTYPE_BYTES
from planner.weight_products import LARGE_BYTES, deferrable_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest bytes alive, above what was alive before, parameters' `.grad` not counted.

    `forward_bytes` starts from nothing of this program alive (its inputs not counted).
    `backward_bytes` starts with everything kept alive and counts that too, and the
    gradient of the outputs that is handed in. `input_gradient_bytes` is the same of a backward
    that puts weight gradients aside, and `pending_bytes` what then waits for them;
    `owning_bytes` of one that holds every parameter's gradient it has made to its end.
    """

    forward_bytes: int
    backward_bytes: int
    input_gradient_bytes: int
    pending_bytes: int
    owning_bytes: int


def find_peaks(program: Program, saved: SavedTensors) -> Peaks:
    """Return the peaks of one forward and one backward of a bound program."""
    later = {name: product[0].name for name, product in deferrable_products(program).items()}
    backward, _ = _backward_peak(program, saved, {})
    split, pending = _backward_peak(program, saved, later)
    owning, _ = _backward_peak(program, saved, {}, owns_gradients=True)
    return Peaks(
        forward_bytes=_forward_peak(program, saved),
        backward_bytes=backward,
        input_gradient_bytes=split,
        pending_bytes=pending,
        owning_bytes=owning,
    )


def _forward_peak(program: Program, saved: SavedTensors) -> int:
    storage = saved.storages.storage
    kept = {s.root for storages, _ in saved.by_op.values() for s in storages}
    last_use: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for name in (*op.inputs, *op.outputs):
            last_use[storage[name].root] = index
    for name in program.outputs:
        last_use[storage[name].root] = len(program.ops)
    dying: dict[int, list[str]] = {}
    for root, index in last_use.items():
        dying.setdefault(index, []).append(root)

    outside = {storage[name].root for name in (*program.inputs, *program.params)}
    live = peak = 0
    alive: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for name in op.outputs:
            owner = storage[name]
            if owner.root not in alive and owner.root not in outside:
                alive[owner.root] = owner.num_bytes
                live += owner.num_bytes
        live += saved.by_op.get(op.name, ((), 0))[1]
        peak = max(peak, live + _scratch_bytes(op, program, saved, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in kept:
                live -= alive.pop(root)
    return peak


def _backward_peak(
    program: Program,
    saved: SavedTensors,
    later: Mapping[str, str],
    *,
    owns_gradients: bool = False,
) -> tuple[int, int]:
    """Return the peak, and what is left at the end for the products named in `later` (with
    their activation): that activation and the gradient of the product.
    """
    tensor = program.tensor
    waiting = {saved.storages.storage[name].root for name in later.values()}
    grads = Gradients()
    for name in program.outputs:
        if tensor[name].requires_grad:
            grads.allocate(name, _bytes(program, name))
    live_saved = saved.num_bytes
    outside = {s.root for n in program.inputs for s in (saved.storages.storage[n],)}
    peak = live_saved + grads.live
    for op in reversed(program.ops):
        arriving = [name for name in op.outputs if name in grads.of]
        if arriving:
            needing = [n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad]
            scratch = _scratch_bytes(op, program, saved, forward=False)
            for name in needing:
                if tensor[name].kind == "param" and owns_gradients:
                    if name not in grads.of:
                        grads.allocate(name, _bytes(program, name))
                elif tensor[name].kind == "param":
                    scratch += 0 if op.name in later else _bytes(program, name)
                elif passes_on(op, name, program, saved):
                    grads.share(name, arriving[0], gaps=leaves_gaps(op, program))
                else:
                    grads.allocate(name, _bytes(program, name))
            peak = max(peak, live_saved + grads.live + scratch)
            for name in arriving if op.name not in later else ():
                grads.free(name)
        kept, extra = saved.by_op.get(op.name, ((), 0))
        held = outside | waiting
        live_saved -= extra + sum(s.num_bytes for s in kept if s.root not in held)
        for name in needing if arriving else ():
            before = grads.live
            peak = max(peak, live_saved + before + grads.add_up(name, _bytes(program, name)))
    roots = {s.root: s for kept, _ in saved.by_op.values() for s in kept}
    pending = sum(roots[root].num_bytes for root in waiting if root in roots)
    pending += grads.bytes_of(
        output for op in program.ops if op.name in later for output in op.outputs
    )
    return peak, pending


class ForwardWalk(NamedTuple):
    """The highest point of a run above its start, and the bytes it leaves beside its edges."""

    rise_bytes: int
    left_bytes: int


def forward_walk(
    program: Program,
    saved: SavedTensors,
    *,
    roots: frozenset[str],
    extra: Mapping[str, int],
    there: frozenset[str] = frozenset(),
    skipped: frozenset[str] = frozenset(),
    stops: bool = False,
) -> ForwardWalk:
    """Run a program's ops and return the bytes that takes beside its inputs and params.

    `roots` are the storages that stay, and `extra` what ops keep besides, by op. Storages in
    `there` exist already, and ops in `skipped` do not run: they take what they are given and
    let it go. With `stops` the run ends once it
    has made all that stays.
    """
    storage = saved.storages.storage
    outside = {storage[name].root for name in (*program.inputs, *program.params)} | there
    last_use: dict[str, int] = {}
    end = 0
    for index, op in enumerate(program.ops):
        for name in (*op.inputs, *op.outputs):
            last_use[storage[name].root] = index
        keeps = saved.kept[op.name]
        if keeps.extra_bytes or any(storage[name].root in roots for name in keeps.tensors):
            end = index + 1
    if not stops:
        end = len(program.ops)
        last_use |= {storage[name].root: end for name in program.outputs}
    dying: dict[int, list[str]] = {}
    for root, index in last_use.items():
        dying.setdefault(index, []).append(root)
    live = peak = 0
    alive: dict[str, int] = {}
    for index, op in enumerate(program.ops[:end]):
        if op.name not in skipped:
            for name in op.outputs:
                owner = storage[name]
                if owner.root not in alive and owner.root not in outside:
                    alive[owner.root] = owner.num_bytes
                    live += owner.num_bytes
            stays = extra.get(op.name, 0)
            passing = saved.kept[op.name].extra_bytes - stays
            live += stays
            peak = max(peak, live + passing + _scratch_bytes(op, program, saved, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in roots:
                live -= alive.pop(root)
    edges = {storage[name].root for name in program.outputs}
    left = sum(extra.values()) + sum(alive.get(root, 0) for root in roots - edges)
    return ForwardWalk(peak, left)


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
            grads.allocate(name, _bytes(program, name))
    given_by = {grads.buffer_of(name)[0]: name for name in grads.of}
    for name in begun:
        grads.allocate(name, _bytes(program, name))
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
            scratch = _scratch_bytes(op, program, saved, forward=False)
            scratch += _unreduced_bytes(op, needing, program)
            for name in needing:
                size = _bytes(program, name)
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
                    there[f"rows of {op.name}"] = _bytes(program, product[0].name)
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
            size = _bytes(program, name)
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
        held.append((f"rows of {op.name}", _bytes(program, x.name)))
    made_from = saved.storages.storage[weight.name]
    return Aside(
        held=(*held, (f"gradient {given_by.get(buffer, buffer)}", size)),
        weight_bytes=_bytes(program, weight.name),
        bias_bytes=0 if bias is None else _bytes(program, bias.name),
        adds=program.tensor[weight.name].kind == "param",
        whole_bytes=made_from.num_bytes,
        weight=made_from.root,
    )


def _is_held_as_given(x: str, program: Program, saved: SavedTensors) -> bool:
    """Whether a product put aside waits with its input; else with a copy of it in rows."""
    return has_rows(program.tensor[x].shape_at(1), saved.storages.strides[x])


def _scratch_bytes(op: Op, program: Program, saved: SavedTensors, *, forward: bool) -> int:
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it keeps; below
    zero where it lets those go before it has made all of these.
    """
    name = base_name(op.target)
    if op.target == REDISTRIBUTE:
        src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
        size = max(_bytes(program, op.inputs[0]), _bytes(program, op.outputs[0]))
        return staging_bytes(src, dst, size, forward=forward, grad_partial=bool(op.args[4]))
    if name == "cross_entropy_loss":
        # Backward: the gradient of the log-softmax, then the logits'.
        return 0 if forward else _bytes(program, op.inputs[0])
    if name in _FACTORS and not forward:
        return _FACTORS[name] * _bytes(program, op.outputs[0])
    if name == "scaled_dot_product_attention" and is_plain(op, program, saved.device_type):
        return (forward_scratch if forward else backward_scratch)(op, program)
    if name == "vocab_cross_entropy":
        logits = program.tensor[op.inputs[0]]
        element = max(4, DTYPE_BYTES[logits.dtype])
        wide = prod(logits.shape_at(1)) * element
        samples = prod(program.tensor[op.inputs[1]].shape_at(1))
        # Forward: shifted logits and their exponentials beside the probabilities, and by sample
        # the maximum, three sums before and after they are reduced, two losses and a flag.
        # Backward: the gradient before and after the targets' share is added, and by sample
        # that share and the loss's gradient.
        return 2 * wide + samples * (9 * element + 1) if forward else wide + 2 * samples * element
    return 0


_FACTORS = {"pow": 2, "rsqrt": 2, "cos": 2, "sin": 1, "sqrt": 1, "abs": 1}
"""Tensors of the result's size that a backward makes before it multiplies the gradient by the
last of them: 3 x^2 by way of x^2 (PyTorch's derivatives.yaml)."""


def _unreduced_bytes(op: Op, needing: Sequence[str], program: Program) -> int:
    """Bytes by which the backward of a product with broadcasting or mixed dtypes is higher than
    its inputs' gradients: it makes them all like its output, then sums or casts one by one.
    """
    if base_name(op.target) != "mul":
        return 0
    made = _bytes(program, op.outputs[0])
    live = peak = made * len(needing)
    for name in needing:
        size = _bytes(program, name)
        if size != made:
            peak = max(peak, live + size)
            live += size - made
    return peak - live


def staging_bytes(
    src: Placement, dst: Placement, num_bytes: int, *, forward: bool, grad_partial: bool = False
) -> int:
    """Bytes in which a collective's pieces are put side by side: collectives cut dim 0, and
    what is cut along another is copied before or after (`planner.runtime.collectives`).
    `num_bytes` are those of the larger of what a rank has before and after.
    """
    kind = collectives(src, dst, grad_partial)[0 if forward else 1]
    cuts = [p for p in (src, dst) if isinstance(p, Shard)]
    if kind is None or kind == "all_reduce" or all(p.dim == 0 and p.segments == 1 for p in cuts):
        return 0
    return 2 * num_bytes if kind == "all_to_all" else num_bytes


def _bytes(program: Program, name: str) -> int:
    meta = program.tensor[name]
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]
