"""What selective recomputation keeps of a block, and what it holds on top while it runs again.

As the runtime does it (`planner.runtime.stage.recompute`): of an op that is not made again it
keeps what the op's own autograd saves of its making, and its result where an op made again
reads it or another such op saves it. What was given to it by an op made again is made again.
Results that only ops after the last saved tensor read are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.memory.ops.saved import HELD_ANYWAY, SavedTensors
from costmodel.memory.ops.storage import Storage
from planner.graph import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveBytes:
    """`kept_bytes` lie between forward and backward, the block's inputs not counted;
    `unsaved_bytes` are those of them that a backward without recomputation does not need.
    """

    kept_bytes: int
    unsaved_bytes: int


def selective_bytes(
    program: Program, saved: SavedTensors, recomputed: Iterable[str]
) -> SelectiveBytes:
    """Return what a bound local program keeps when the ops named in `recomputed` run again."""
    roots, extra = kept_storages(program, saved, recomputed)
    needed = {storage.root for storages, _ in saved.by_op.values() for storage in storages}
    return SelectiveBytes(
        kept_bytes=sum(roots.values()) + sum(extra.values()),
        unsaved_bytes=sum(size for root, size in roots.items() if root not in needed),
    )


def kept_storages(
    program: Program, saved: SavedTensors, recomputed: Iterable[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of each storage kept when the ops named in `recomputed` run again, inputs
    left out, and what each other op keeps besides (masks, statistics), by its name.
    """
    again = frozenset(recomputed)
    storage = saved.storages.storage
    maker = {output: op.name for op in program.ops for output in op.outputs}
    read_again = {
        name for op in program.ops if op.name in again for name in op.inputs if name in maker
    }
    kept: dict[str, Storage] = {}
    extra: dict[str, int] = {}
    saves_later = False
    for op in reversed(program.ops):
        mine = saved.kept[op.name]
        if op.name in again:
            saves_later = saves_later or bool(mine.tensors or mine.extra_bytes)
            continue
        if mine.extra_bytes:
            extra[op.name] = mine.extra_bytes
        if saves_later:
            kept |= {name: storage[name] for name in op.outputs if name in read_again}
        for name in mine.tensors:
            if maker.get(name) in again:
                saves_later = True
            elif storage[name].kind not in HELD_ANYWAY:
                kept[name] = storage[name]
    roots = {
        storage.root: storage.num_bytes
        for storage in kept.values()
        if storage.root not in program.inputs
    }
    return roots, extra


def held_results(
    program: Program, saved: SavedTensors, recomputed: Iterable[str]
) -> frozenset[str]:
    """Return the storages that a call of the block holds for its second run, and so until nothing
    is left of its graph: results that an op made again reads.
    """
    again = frozenset(recomputed)
    roots, _ = kept_storages(program, saved, again)
    maker = {output: op.name for op in program.ops for output in op.outputs}
    read = {name for op in program.ops if op.name in again for name in op.inputs if name in maker}
    return frozenset(
        saved.storages.storage[name].root for name in read if maker[name] not in again
    ) & frozenset(roots)
