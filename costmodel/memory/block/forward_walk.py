"""The forward of a program, op by op or kernel by kernel: the highest bytes alive inside it.

Inside a fused kernel of a compiled forward nothing has memory: it writes what others read, what the
program returns and what is saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from costmodel.memory.saved import SavedTensors, StorageMap, scratch_bytes
from costmodel.table.fusion import fused_kernels
from planner.language.graph import Op


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
    steps = _steps(saved.storages)
    for index, (ops, _) in enumerate(steps):
        for op in ops:
            for name in (*op.inputs, *op.outputs):
                last_use[storage[name].root] = index
            mine = saved.saved[op.name]
            if mine.extra_bytes or any(storage[name].root in roots for name in mine.tensors):
                end = index + 1
    # Outputs are handed on, so nothing inside the program frees them.
    if not stops:
        end = len(steps)
        last_use |= {storage[name].root: end for name in program.outputs}
        last_use |= dict.fromkeys(last_use.keys() & lasting, end)
    last_used_by: dict[int, list[str]] = {}
    for root, index in last_use.items():
        last_used_by.setdefault(index, []).append(root)
    live = peak = 0
    alive: dict[str, int] = {}
    for index, (ops, is_kernel) in enumerate(steps[:end]):
        run = [op for op in ops if op.name not in skipped]
        for name in (name for op in run for name in op.outputs):
            owner = storage[name]
            if owner.root in alive or owner.root in outside:
                continue
            if is_kernel and last_use[owner.root] == index and owner.root not in roots:
                continue  # the kernel hands it on to itself
            alive[owner.root] = owner.num_bytes
            live += owner.num_bytes
        stays = sum(extra.get(op.name, 0) for op in run)
        live += stays
        temporary = 0
        if run and not is_kernel:
            # What a kernel makes to be saved and is not kept (a mask that is recomputed later)
            # lives as long as the kernel runs.
            temporary = sum(saved.saved[op.name].extra_bytes for op in run) - stays
            temporary += sum(scratch_bytes(op, saved.storages, forward=True) for op in run)
        peak = max(peak, live + temporary)
        # Python frees a value when the op that reads it last returns.
        for root in last_used_by.get(index, ()):
            if root in alive and root not in roots:
                live -= alive.pop(root)
    return peak


def _steps(storages: StorageMap) -> list[tuple[tuple[Op, ...], bool]]:
    """Return the ops that run at a time, in order, and whether they are a fused kernel.

    A kernel runs when the last of its ops would, or ahead of the first op that reads of it.
    """
    ops = storages.program.ops
    if not storages.is_compiled:
        return [((op,), False) for op in ops]
    kernels = {
        op.name: kernel
        for kernel in fused_kernels(storages.program, storages.views)
        for op in kernel
    }
    maker = {name: op.name for op in ops for name in op.outputs}
    steps: list[tuple[tuple[Op, ...], bool]] = []
    run: set[str] = set()

    def run_kernel(kernel: tuple[Op, ...]) -> None:
        if kernel[0].name not in run:
            run.add(kernel[0].name)
            steps.append((kernel, True))

    for op in ops:
        kernel = kernels.get(op.name)
        if kernel is None:
            for read in (kernels.get(maker.get(name, "")) for name in op.inputs):
                if read is not None:
                    run_kernel(read)
            steps.append(((op,), False))
        elif op is kernel[-1]:
            run_kernel(kernel)
    return steps
