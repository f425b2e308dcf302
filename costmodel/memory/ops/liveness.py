"""Memory a program needs beyond what it keeps: the highest point inside forward and backward.

Programs are walked op by op. A forward value is freed after its last reader unless autograd keeps
it. The walk backward here is of a program alone, for its peaks; one with neighbours is in
`backward_walk`, how gradients share buffers in `gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.memory.ops.gradients import Gradients
from costmodel.memory.ops.kernel_scratch import scratch_bytes
from costmodel.memory.ops.saved import SavedTensors
from costmodel.time.backward_facts import BackwardFacts, backward_facts
from planner.graph import Program
from planner.ops.weight_products import ProductArgs


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


def find_peaks(program: Program, saved: SavedTensors, products: Mapping[str, ProductArgs]) -> Peaks:
    """Return the peaks of one forward and one backward of a bound program with those
    `deferrable_products`.
    """
    facts = backward_facts(program, saved, products)
    backward, _ = _backward_peak(facts, saved, {})
    split, pending = _backward_peak(facts, saved, facts.products)
    owning, _ = _backward_peak(facts, saved, {}, owns_gradients=True)
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
        peak = max(peak, live + scratch_bytes(op, program, saved, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in kept:
                live -= alive.pop(root)
    return peak


def _backward_peak(
    facts: BackwardFacts,
    saved: SavedTensors,
    later: Mapping[str, str],
    *,
    owns_gradients: bool = False,
) -> tuple[int, int]:
    """Return the peak, and what is left at the end for the products named in `later` (with
    their activation): that activation and the gradient of the product.
    """
    waiting = {saved.storages.storage[name].root for name in later.values()}
    grads = Gradients()
    for name, size in facts.outputs.items():
        grads.allocate(name, size)
    live_saved = facts.kept_bytes
    held = waiting | {facts.roots[name] for name in facts.program.inputs}
    peak = live_saved + grads.live
    for one in facts.ops:
        op = one.op
        arriving = [name for name in op.outputs if name in grads.of]
        if arriving:
            scratch = one.scratch_bytes
            for taker in one.takers:
                if taker.is_param and owns_gradients:
                    if taker.name not in grads.of:
                        grads.allocate(taker.name, taker.num_bytes)
                elif taker.is_param:
                    scratch += 0 if op.name in later else taker.num_bytes
                elif taker.is_same:
                    grads.share(taker.name, arriving[0], gaps=taker.has_gaps)
                else:
                    grads.allocate(taker.name, taker.num_bytes)
            peak = max(peak, live_saved + grads.live + scratch)
            for name in arriving if op.name not in later else ():
                grads.free(name)
        live_saved -= one.extra_bytes + sum(size for root, size in one.kept if root not in held)
        for taker in one.takers if arriving else ():
            before = grads.live
            more = grads.add_up(taker.name, taker.num_bytes)
            peak = max(peak, live_saved + before + more)
    pending = sum(facts.kept[root] for root in waiting if root in facts.kept)
    pending += grads.bytes_of(
        output for one in facts.ops if one.op.name in later for output in one.op.outputs
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
            peak = max(peak, live + passing + scratch_bytes(op, program, saved, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in roots:
                live -= alive.pop(root)
    edges = {storage[name].root for name in program.outputs}
    left = sum(extra.values()) + sum(alive.get(root, 0) for root in roots - edges)
    return ForwardWalk(peak, left)
