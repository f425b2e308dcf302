"""What autograd keeps from forward to backward, counted by storage.

Each op's part is in `costmodel.memory.ops.kept_rules`; the tests hold the whole against
`torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.memory.ops.kept import Context, Kept
from costmodel.memory.ops.kept_rules import kept_by
from costmodel.memory.ops.storage import Storage, StorageMap, map_storages
from planner.graph import Program

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

    kept: dict[str, Kept]
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
    context = Context(program=program, storages=storages, device_type=device_type, aside=aside)
    seen: set[str] = set()
    by_op = {}
    kept_of = {op.name: kept_by(op, context) for op in program.ops}
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
