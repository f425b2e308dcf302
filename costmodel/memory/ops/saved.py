"""What autograd keeps from forward to backward, counted by storage.

Each op's part follows from the record of its family (`planner.ops.record`); the tests hold the
whole against `torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.memory.ops.storage import Storage, StorageMap, map_storages
from planner.graph import Op, Program
from planner.ops.kernel import KernelCall, Saved
from planner.ops.record import family_of

HELD_ANYWAY = frozenset({"param", "buffer", "constant", "input"})
"""Kinds whose storage lives through the step whether or not autograd refers to it."""


@dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """What a program keeps for its backward, deduplicated by storage.

    `kept[op.name]` is what each op keeps; `by_op[op.name]` lists the storages that op is the
    first to keep and its extra bytes.
    `inputs` and `outputs` name the program's own activation inputs and outputs that are
    kept: their storage may also be kept by the neighbouring program.
    """

    kept: dict[str, Saved]
    by_op: dict[str, tuple[tuple[Storage, ...], int]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    storages: StorageMap
    device_type: str

    @property
    def num_bytes(self) -> int:
        """Bytes kept in all, inputs and outputs included."""
        return sum(sum(s.num_bytes for s in kept) + extra for kept, extra in self.by_op.values())


def saved_tensors(
    program: Program,
    *,
    device_type: str = "cuda",
    aside: frozenset[str] = frozenset(),
    held_anyway: frozenset[str] = HELD_ANYWAY,
) -> SavedTensors:
    """Return what the backward of a bound program needs from its forward.

    `device_type` picks between kernels that keep different things (dropout on CPU keeps its
    noise in the input's dtype, on a GPU one byte an element). `aside` names products whose weight
    gradients are put aside: they keep all they were given, as it was given. `held_anyway` are
    kinds of tensors that are there whether kept or not.
    """
    storages = map_storages(program, device_type=device_type)
    seen: set[str] = set()
    by_op = {}
    kept_of = {
        op.name: Saved(tensors=op.inputs)
        if op.name in aside and _is_differentiable(op, program)
        else saved_by(op, program, storages, device_type)
        for op in program.ops
    }
    for op in program.ops:
        kept = kept_of[op.name]
        first = []
        for name in kept.tensors:
            storage = storages.storage[name]
            if storage.root not in seen and storage.kind not in held_anyway:
                seen.add(storage.root)
                first.append(storage)
        if first or kept.extra_bytes:
            by_op[op.name] = (tuple(first), kept.extra_bytes)
    return SavedTensors(
        kept=kept_of,
        by_op=by_op,
        inputs=tuple(n for n in program.inputs if n in seen),
        outputs=tuple(
            n for n in program.outputs
            if storages.storage[n].root in seen and storages.storage[n].root not in program.inputs
        ),
        storages=storages,
        device_type=device_type,
    )  # fmt: skip


def saved_by(op: Op, program: Program, storages: StorageMap, device_type: str) -> Saved:
    """Return what an op saves for its backward; a view saves nothing."""
    if not _is_differentiable(op, program) or op.outputs[0] in storages.views:
        return Saved()
    call = KernelCall(op, program.tensor, storages.strides, device_type)
    return family_of(op.target).saved(call)


def _is_differentiable(op: Op, program: Program) -> bool:
    return any(program.tensor[name].requires_grad for name in op.outputs)
