"""What recomputation keeps of a block between its two runs (activation checkpointing).

As the runtime does it (`planner.runtime.stage.recompute`), ops are of two kinds. Those that run
again keep nothing. Of every other op it keeps what autograd saves of it, and its result where an
op that runs again reads it, or where another such op saves it. A result that only ops after the
last saved tensor read is dropped: the second run stops before them.

    recompute = "none"          no op runs again
    recompute = "selective"     cheap ops run again
    recompute = "full"          all ops run again: inputs of the block are kept, nothing else
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from costmodel.memory.saved import HELD_ANYWAY, SavedTensors, Storage


class Kept(NamedTuple):
    """What a block keeps from its first run to its backward, inputs left out."""

    roots: dict[str, int]
    """Bytes of each storage."""
    extra: dict[str, int]
    """Bytes kept beside tensors (masks, statistics), by op."""
    results: frozenset[str]
    """Those of the storages that the call of the block refers to for its second run. They are
    freed when nothing is left of its graph; others are freed op by op."""
    read: frozenset[str]
    """Storages of all results that the call refers to until its first run ends: then it drops those
    that the second run does not get to."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.roots.values()) + sum(self.extra.values())


def kept_storages(saved: SavedTensors, recomputed: Collection[str]) -> Kept:
    """Return what a bound local program keeps when the ops named in `recomputed` run again."""
    program, storage = saved.program, saved.storages.storage
    maker = {output: op.name for op in program.ops for output in op.outputs}
    # What ops of the second run read of other ops. The block's inputs are kept in any case.
    read_again = {
        name for op in program.ops if op.name in recomputed for name in op.inputs if name in maker
    }
    kept: dict[str, Storage] = {}
    extra: dict[str, int] = {}
    # From the last op on: whether the second run reaches an op depends on what is saved behind it.
    saves_later = False  # whether the second run has to get as far as here
    for op in reversed(program.ops):
        mine = saved.saved[op.name]
        if op.name in recomputed:
            saves_later = saves_later or bool(mine.tensors or mine.extra_bytes)
            continue
        # Copies of what the second run makes are made in that run.
        remade = [name for name in mine.copies if maker.get(storage[name].root) in recomputed]
        saves_later = saves_later or bool(remade)
        left = mine.extra_bytes - sum(program.tensor[name].bytes_at(1) for name in remade)
        if left:
            extra[op.name] = left
        if saves_later:
            kept |= {name: storage[name] for name in op.outputs if name in read_again}
        for name in mine.tensors:
            if maker.get(name) in recomputed:
                saves_later = True  # the second run makes it
            elif storage[name].kind not in HELD_ANYWAY:
                kept[name] = storage[name]
    # Views of one storage count once; inputs are the block's neighbours'.
    roots = {s.root: s.num_bytes for s in kept.values() if s.root not in program.inputs}
    read = frozenset(storage[name].root for name in read_again if maker[name] not in recomputed)
    return Kept(roots, extra, results=read & roots.keys(), read=read)


class KeptOfGraphs(NamedTuple):
    """What a block of compiled graphs keeps from its forward to its backward."""

    kept: Kept
    """All but inputs."""
    inputs: frozenset[str]
    """Inputs of the block that it keeps."""
    again: frozenset[str]
    """The ops that the backward runs again."""


def kept_of_graphs(saved: SavedTensors, recomputed: Collection[str]) -> KeptOfGraphs:
    """Return what a compiled block keeps when ops named in `recomputed` run again: of these the
    backward runs what it needs, from what other ops left (`planner.runtime.stage.compiled.halves`).
    """
    program, storage = saved.program, saved.storages.storage
    maker = {output: op for op in program.ops for output in op.outputs}
    kept: dict[str, Storage] = {}
    runs: set[str] = set()
    met: set[str] = set()
    waiting = [name for mine in saved.saved.values() for name in mine.tensors]
    while waiting:
        name = waiting.pop()
        if name in met:
            continue
        met.add(name)
        op = maker.get(name)
        if op is None or not (op.name in recomputed or name in saved.storages.views):
            kept[name] = storage[name]
        else:
            runs.add(op.name)
            waiting.extend(op.inputs)
    roots = {
        s.root: s.num_bytes
        for s in kept.values()
        if s.root not in program.inputs and s.kind not in HELD_ANYWAY
    }
    extra = {
        op.name: saved.saved[op.name].extra_bytes
        for op in program.ops
        if op.name not in recomputed and saved.saved[op.name].extra_bytes
    }
    inputs = frozenset(s.root for s in kept.values() if s.root in program.inputs)
    return KeptOfGraphs(Kept(roots, extra, frozenset(), frozenset()), inputs, frozenset(runs))
