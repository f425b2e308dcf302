"""Memory a program needs beyond what it keeps: the highest point inside forward and backward.

`forward_walk` runs a program op by op. `find_peaks` takes the peaks of a program alone, without
neighbours, from the same two walks (`backward_walk`) that the exact fidelity runs block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.memory.block.backward_facts import backward_facts
from costmodel.memory.block.backward_walk import backward_walk
from costmodel.memory.ops.kernel_scratch import scratch_bytes
from costmodel.memory.ops.saved import SavedTensors
from planner.graph import Program
from planner.ops.weight_products import ProductArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest bytes alive in one forward and one backward of a program alone.

    `forward_bytes` starts from nothing of this program alive; its inputs are not counted.
    `backward_bytes` starts with everything saved alive and counts that too, and the gradient of
    the outputs that is handed in. It counts a parameter's gradient as long as its op runs.
    """

    forward_bytes: int
    backward_bytes: int


def find_peaks(program: Program, saved: SavedTensors, products: Mapping[str, ProductArgs]) -> Peaks:
    """Return the peaks of a bound program with those `deferrable_products`."""
    facts = backward_facts(program, saved, products)
    rise = backward_walk(facts, first=False, held=frozenset()).rise_bytes
    return Peaks(
        forward_bytes=forward_walk(
            program,
            saved,
            roots=frozenset(
                storage.root for storages, _ in saved.by_op.values() for storage in storages
            ),
            extra={op.name: saved.kept[op.name].extra_bytes for op in program.ops},
        ),
        backward_bytes=facts.kept_bytes + sum(facts.outputs.values()) + rise,
    )


def forward_walk(
    program: Program,
    saved: SavedTensors,
    *,
    roots: frozenset[str],
    extra: Mapping[str, int],
    there: frozenset[str] = frozenset(),
    skipped: frozenset[str] = frozenset(),
    stops: bool = False,
) -> int:
    """Run a program's ops and return the highest bytes alive beside its inputs and params.

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
    return peak
