"""Which tensors of a program share memory: storages, views and strides, without torch.

Memory is held by storages, not tensors: a saved view keeps its whole base alive, and two
saved views of one base cost once. Whether `reshape` or `contiguous` copies depends on
strides, so they are followed too. Which ops are views and how results lie in memory stands in the
records of `planner.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph import Program
from planner.ops.kernel import KernelCall
from planner.ops.record import family_of
from planner.ops.strides import Strides, contiguous_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory: the tensor that made it, its bytes, and that tensor's kind."""

    root: str
    num_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class StorageMap:
    """Storages and strides of every tensor of a bound program.

    `storage[name]` is the storage a tensor lives in; `strides[name]` its strides in
    elements; `is_view` holds names whose op allocated nothing.
    """

    storage: Mapping[str, Storage]
    strides: Mapping[str, Strides]
    views: frozenset[str]


def map_storages(program: Program, *, device_type: str = "cuda") -> StorageMap:
    """Follow views through a bound program (every size a number). `device_type` picks between
    kernels that lay their results out differently.
    """
    storage: dict[str, Storage] = {}
    strides: dict[str, Strides] = {}
    views: set[str] = set()
    for name in (*program.inputs, *program.params):
        meta = program.tensor[name]
        storage[name] = Storage(root=name, num_bytes=meta.bytes_at(1), kind=meta.kind)
        strides[name] = contiguous_strides(meta.shape_at(1))
    for op in program.ops:
        family = family_of(op.target)
        call = KernelCall(op, program.tensor, strides, device_type)
        for position, output in enumerate(op.outputs):
            view = family.view(call, position) if family.view is not None and op.inputs else None
            if view is not None:
                storage[output], strides[output] = storage[view.source], view.strides
                views.add(output)
            else:
                meta = program.tensor[output]
                storage[output] = Storage(root=output, num_bytes=meta.bytes_at(1), kind=meta.kind)
                strides[output] = family.result(call, output)
    return StorageMap(storage=storage, strides=strides, views=frozenset(views))
