"""Memory a program needs beyond what it keeps: the highest point inside forward and backward.

Forward and backward are walked op by op. A forward value is freed after its last reader
unless autograd keeps it; a gradient is freed once the op that made its tensor has run
backward; what autograd kept is freed by the earliest op that kept it. Gradients follow
autograd's habits: views and sums pass their gradient on without a copy, and the second
gradient that reaches a tensor is added to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from costmodel.saved import HELD_ANYWAY, SavedTensors
from costmodel.storage import (
    RESHAPES,
    Strides,
    base_name,
    contiguous_strides,
    permuted,
    reshaped_strides,
)
from planner.graph import Op, Program, Ref
from planner.placement import Shard, parse_placement
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
        peak = max(peak, live + _scratch_bytes(op, program, forward=True))
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
    grads = _Gradients()
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
            scratch = _scratch_bytes(op, program, forward=False)
            for name in needing:
                if tensor[name].kind == "param" and owns_gradients:
                    if name not in grads.of:
                        grads.allocate(name, _bytes(program, name))
                elif tensor[name].kind == "param":
                    scratch += 0 if op.name in later else _bytes(program, name)
                elif _passes_on(op, name, program, saved):
                    grads.share(name, arriving[0])
                else:
                    grads.allocate(name, _bytes(program, name))
            peak = max(peak, live_saved + grads.live + scratch)
            grads.settle(needing)
            for name in arriving if op.name not in later else ():
                grads.free(name)
        kept, extra = saved.by_op.get(op.name, ((), 0))
        held = outside | waiting
        live_saved -= extra + sum(s.num_bytes for s in kept if s.root not in held)
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
    `there` exist already, and ops in `skipped` do not run. With `stops` the run ends once it
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
        if op.name in skipped:
            continue
        for name in op.outputs:
            owner = storage[name]
            if owner.root not in alive and owner.root not in outside:
                alive[owner.root] = owner.num_bytes
                live += owner.num_bytes
        stays = extra.get(op.name, 0)
        passing = saved.kept[op.name].extra_bytes - stays
        live += stays
        peak = max(peak, live + passing + _scratch_bytes(op, program, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in roots:
                live -= alive.pop(root)
    edges = {storage[name].root for name in program.outputs}
    left = sum(extra.values()) + sum(alive.get(root, 0) for root in roots - edges)
    return ForwardWalk(peak, left)


class Aside(NamedTuple):
    """A weight gradient put aside in the backward: the storages it waits with, by name, and
    the bytes of the gradients of weight and bias that it will make. `adds` tells whether the
    product can be added to a gradient that is there without being made first.
    """

    held: tuple[tuple[str, int], ...]
    weight_bytes: int
    bias_bytes: int
    adds: bool


class BackwardWalk(NamedTuple):
    """The highest point of a backward above its start, where everything saved and the
    gradients of the outputs are alive; the parameters whose gradients it makes; and what it
    puts aside, in that order.
    """

    rise_bytes: int
    made: frozenset[str]
    aside: tuple[Aside, ...]


def backward_walk(
    program: Program,
    saved: SavedTensors,
    *,
    first: bool,
    held: bool,
    split: bool = False,
    wide: int = 1,
    shared: frozenset[str] = frozenset(),
    adds_products: bool = True,
) -> BackwardWalk:
    """Run a program's backward.

    In a `first` backward the gradients of parameters stay, `wide` times as large as the
    parameters; in others they are added to those and let go, and products with a large
    weight add theirs without making it first, if it is as wide and `adds_products`. Those of
    parameters that are `shared` with another block stay in both. `held`: somebody else holds the
    gradients of the outputs. `split`: weight gradients are put aside.
    """
    tensor, storage = program.tensor, saved.storages.storage
    with_weights = deferrable_products(program)
    products = with_weights if split else {}
    grads = _Gradients()
    for name in program.outputs:
        if tensor[name].requires_grad:
            grads.allocate(name, _bytes(program, name))
            if held:
                grads.hold(name)
    start = saved.num_bytes + grads.live
    live_saved = saved.num_bytes
    never_freed = {storage[name].root for name in program.inputs}
    never_freed |= {storage[product[0].name].root for product in products.values()}
    laid = {name: contiguous_strides(tensor[name].shape_at(1)) for name in program.outputs}
    there: dict[str, int] = {}
    made: set[str] = set()
    aside: list[Aside] = []
    peak = start
    for op in reversed(program.ops):
        arriving = [name for name in op.outputs if name in grads.of]
        if arriving:
            product = products.get(op.name)
            later = {ref.name for ref in product[1:3] if isinstance(ref, Ref)} if product else set()
            needing = [
                n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad and n not in later
            ]
            scratch = _scratch_bytes(op, program, forward=False)
            for name in needing:
                size = _bytes(program, name)
                passes_on = _passes_on(op, name, program, saved)
                if tensor[name].kind != "param":
                    shape = tensor[name].shape_at(1)
                    seen = laid.get(arriving[0]) if passes_on else None
                    through = None if seen is None else _seen_through(op, name, program, seen)
                    if through is not None:
                        grads.share(name, arriving[0])
                    else:
                        grads.allocate(name, size)
                    laid.setdefault(name, through or contiguous_strides(shape))
                    continue
                made.add(name)
                if name in shared:
                    there[name] = size
                elif first:
                    there[name] = wide * size
                    scratch += size if wide > 1 and not passes_on else 0
                else:
                    product_of = with_weights.get(op.name)
                    is_weight = product_of is not None and product_of[1].name == name
                    adds = is_weight and adds_products and wide == 1 and size >= LARGE_BYTES
                    scratch += 0 if passes_on or adds else size
            peak = max(peak, live_saved + grads.live + sum(there.values()) + scratch)
            grads.settle(needing)
            if product is not None:
                aside.append(_put_aside(op, product, program, saved, grads))
            for name in arriving if product is None else ():
                grads.free(name)
        kept, extra = saved.by_op.get(op.name, ((), 0))
        live_saved -= extra + sum(s.num_bytes for s in kept if s.root not in never_freed)
    return BackwardWalk(peak - start, frozenset(made), tuple(aside))


def _put_aside(
    op: Op,
    product: tuple[Ref, Ref, Ref | None, bool],
    program: Program,
    saved: SavedTensors,
    grads: _Gradients,
) -> Aside:
    x, weight, bias, _ = product
    root = saved.storages.storage[x.name]
    buffer, size = grads.buffer_of(op.outputs[0])
    held = ((root.root, root.num_bytes),) if root.kind not in HELD_ANYWAY else ()
    return Aside(
        held=(*held, (f"gradient {buffer}", size)),
        weight_bytes=_bytes(program, weight.name),
        bias_bytes=0 if bias is None else _bytes(program, bias.name),
        adds=program.tensor[weight.name].kind == "param",
    )


class _Gradients:
    """Gradient buffers by tensor; several tensors may share one. Mutable: it is a tally."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.live = 0
        self._bytes: list[int] = []
        self._users: list[int] = []
        self._second: dict[str, int] = {}

    def allocate(self, name: str, num_bytes: int) -> None:
        self._bytes.append(num_bytes)
        self._users.append(0)
        self.live += num_bytes
        self._attach(name, len(self._bytes) - 1)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of the buffers these tensors' gradients lie in, each once."""
        return sum(self._bytes[b] for b in {self.of[name] for name in names if name in self.of})

    def buffer_of(self, name: str) -> tuple[int, int]:
        """The number of a gradient's buffer, and its bytes."""
        buffer = self.of[name]
        return buffer, self._bytes[buffer]

    def hold(self, name: str) -> None:
        """Keep a gradient's buffer to the end: somebody else has it too."""
        self._users[self.of[name]] += 1

    def share(self, name: str, source: str) -> None:
        self._attach(name, self.of[source])

    def _attach(self, name: str, buffer: int) -> None:
        self._users[buffer] += 1
        if name in self.of:
            self._second[name] = buffer
        else:
            self.of[name] = buffer

    def settle(self, names: list[str]) -> None:
        """Add the second gradient of each tensor to its first, in one buffer."""
        for name in names:
            second = self._second.pop(name, None)
            if second is not None:
                # Added in place when one of the two is used by nobody else; else one more
                # buffer would be needed, and the sum takes the place of the shared one.
                first = self.of[name]
                keep, drop = (second, first) if self._users[first] > 1 else (first, second)
                self.of[name] = keep
                self._release(drop)

    def free(self, name: str) -> None:
        self._release(self.of.pop(name))

    def _release(self, buffer: int) -> None:
        self._users[buffer] -= 1
        if self._users[buffer] == 0:
            self.live -= self._bytes[buffer]


_SUMS = frozenset({"add", "sub", "clone", "contiguous"})


def _passes_on(op: Op, name: str, program: Program, saved: SavedTensors) -> bool:
    """Whether the gradient of `name` is the arriving gradient itself, or a view of it."""
    output = op.outputs[0]
    if len(op.outputs) > 1:
        return False
    source, result = program.tensor[name], program.tensor[output]
    same_size = prod(source.shape_at(1)) == prod(result.shape_at(1))
    if op.target == REDISTRIBUTE:
        src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
        moves = collectives(src, dst, bool(op.args[4]))[1] is not None
        return same_size and not moves and source.dtype == result.dtype
    if base_name(op.target) == "cat":
        return source.dtype == result.dtype  # a slice of it
    if base_name(op.target) in _SUMS:
        return same_size and source.dtype == result.dtype
    return output in saved.storages.views and same_size


def _seen_through(op: Op, name: str, program: Program, strides: Strides) -> Strides | None:
    """Return the strides of an arriving gradient as the gradient of `name`, or None where
    autograd's view of it needs a copy: the backward of a view of one shape is a reshape.
    """
    target = base_name(op.target)
    shape = program.tensor[name].shape_at(1)
    order = permuted(target, op.args, shape, tuple(range(len(shape))))
    if order is not None:
        back = dict(zip(order, strides, strict=True))
        return tuple(back[dim] for dim in range(len(shape)))
    if target in RESHAPES:
        return reshaped_strides(program.tensor[op.outputs[0]].shape_at(1), strides, shape)
    return strides


def _scratch_bytes(op: Op, program: Program, *, forward: bool) -> int:
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it keeps."""
    name = base_name(op.target)
    if op.target == REDISTRIBUTE:
        return _staging_bytes(op, program, forward=forward)
    if name == "cross_entropy_loss":
        # Backward: the gradient of the log-softmax, then the logits'.
        return 0 if forward else _bytes(program, op.inputs[0])
    if name == "vocab_cross_entropy":
        logits = program.tensor[op.inputs[0]]
        wide = prod(logits.shape_at(1)) * max(4, DTYPE_BYTES[logits.dtype])
        # Forward: shifted logits and their exponentials beside the probabilities; backward:
        # the gradient before and after the targets' share is added.
        return 2 * wide if forward else wide
    return 0


def _staging_bytes(op: Op, program: Program, *, forward: bool) -> int:
    """Bytes in which a collective's pieces are put side by side: collectives cut dim 0, and
    what is cut along another is copied before or after (`planner.runtime.collectives`).
    """
    src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
    kind = collectives(src, dst, bool(op.args[4]))[0 if forward else 1]
    cuts = [p for p in (src, dst) if isinstance(p, Shard)]
    if kind is None or kind == "all_reduce" or all(p.dim == 0 and p.segments == 1 for p in cuts):
        return 0
    whole = max(_bytes(program, op.inputs[0]), _bytes(program, op.outputs[0]))
    return 2 * whole if kind == "all_to_all" else whole


def _bytes(program: Program, name: str) -> int:
    meta = program.tensor[name]
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]
