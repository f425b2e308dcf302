"""The forward of a program, op by op: the highest bytes alive inside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from costmodel.memory.saved import SavedTensors, scratch_bytes


def forward_walk(
    saved: SavedTensors,
    *,
    roots: Collection[str],
    extra: Mapping[str, int],
    exist: Collection[str] = (),
    lasting: Collection[str] = (),
    skipped: Collection[str] = (),
    stops: bool = False,
) -> int:
    """Run a program's ops and return the highest bytes alive beside its inputs and params.

    roots: storages that stay, saved for the backward.
    extra: bytes that ops keep beside tensors, by op.
    exist: storages that are alive before the run.
    lasting: storages that are freed at the end of the run at the earliest.
    skipped: ops that do not run. Selective recomputation gives them their saved results: they only
        free what no later op reads.
    stops: the run ends once all that stays is made, as checkpointing stops early.
    """
    program, storage = saved.program, saved.storages.storage
    # Memory that was there before the run: others count it.
    outside = {storage[name].root for name in (*program.inputs, *program.params)}.union(exist)
    # Lifetimes are of storages, not of tensors: a view keeps its whole base alive.
    last_use: dict[str, int] = {}
    end = 0
    for index, op in enumerate(program.ops):
        for name in (*op.inputs, *op.outputs):
            last_use[storage[name].root] = index
        mine = saved.saved[op.name]
        if mine.extra_bytes or any(storage[name].root in roots for name in mine.tensors):
            end = index + 1
    # Outputs are handed on, so nothing inside the program frees them.
    if not stops:
        end = len(program.ops)
        last_use |= {storage[name].root: end for name in program.outputs}
        last_use |= dict.fromkeys(last_use.keys() & lasting, end)
    last_used_by: dict[int, list[str]] = {}
    for root, index in last_use.items():
        last_used_by.setdefault(index, []).append(root)
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
            live += stays
            # What a kernel makes to be saved and is not kept (a mask that is recomputed later)
            # lives as long as the kernel runs.
            temporary = saved.saved[op.name].extra_bytes - stays
            temporary += scratch_bytes(op, saved.storages, forward=True)
            peak = max(peak, live + temporary)
        # Python frees a value when the op that reads it last returns.
        for root in last_used_by.get(index, ()):
            if root in alive and root not in roots:
                live -= alive.pop(root)
    return peak
