"""What one block holds while it runs forward and backward, storage by storage.

Values at a block's edges depend on its neighbours and are counted by the stage (`exact.stage`).
Here they only count where this block makes, keeps or frees them. All amounts are local bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from costmodel.memory.block.backward_facts import backward_facts
from costmodel.memory.block.backward_walk import BackwardWalk, backward_walk
from costmodel.memory.block.forward_walk import forward_walk
from costmodel.memory.block.recomputed import held_results, kept_storages
from costmodel.memory.ops.saved import HELD_ANYWAY, SavedTensors, saved_tensors
from planner.graph import Program
from planner.ops.weight_products import deferrable_products
from planner.plan import Recompute
from planner.units import DTYPE_BYTES

_COPIED = frozenset({"buffer", "constant"})


class Edge(NamedTuple):
    """A value a block takes or makes."""

    num_bytes: int
    requires_grad: bool
    """Whether a gradient belongs to it."""
    is_kept: bool
    """Whether the block keeps it for its backward."""
    viewed: int | None = None
    """The position of the input that it is a view of, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """One block of a class on one rank, under one choice of recomputation."""

    input_names: tuple[str, ...]
    """Local names of the activations it takes."""
    output_names: tuple[str, ...]
    """Local names of the activations it makes."""
    inputs: tuple[Edge, ...]
    """The activations it takes, in the same order."""
    outputs: tuple[Edge, ...]
    """The activations it makes, in the same order."""
    params: Mapping[str, int]
    """Bytes of trained parameters, by local name."""
    param_rows: Mapping[str, int]
    """Lengths of their first dims, along which ZeRO shards."""
    kept_bytes: int
    """Kept between forward and backward, values at the edges apart."""
    recomputed_bytes: int
    """What recomputation adds to that at its end."""
    forward_rise_bytes: int
    """Height of the forward: outputs count, inputs do not."""
    recompute_rise_bytes: int
    """Height of the recomputation."""
    backward: Callable[..., BackwardWalk]
    """`backward_walk` of the block; it remembers its results."""
    deferred: BlockBytes | None = None
    """The block with its weight gradients deferred, if it keeps other things then."""


def block_bytes(
    program: Program, *, device_type: str, recompute: Recompute, recomputed: frozenset[str]
) -> BlockBytes:
    """Return what a bound local program holds; `recomputed` names the ops that run again when
    `recompute` is "selective".
    """
    # A second run gets buffers and constants as copies, which only its graph holds.
    held_anyway = HELD_ANYWAY if recompute == "none" else HELD_ANYWAY - _COPIED
    saved = saved_tensors(program, device_type=device_type, held_anyway=held_anyway)
    there = _held(program, saved, recompute, recomputed)
    deferred = saved_tensors(
        program,
        device_type=device_type,
        aside=frozenset(deferrable_products(program)),
        held_anyway=held_anyway,
    )
    if deferred.by_op == saved.by_op:
        return there
    return replace(there, deferred=_held(program, deferred, recompute, recomputed))


def _held(
    program: Program, saved: SavedTensors, recompute: Recompute, recomputed: frozenset[str]
) -> BlockBytes:
    storage = saved.storages.storage
    every = {
        saved_storage.root: saved_storage.num_bytes
        for storages, _ in saved.by_op.values()
        for saved_storage in storages
    }
    inner = frozenset(every) - frozenset(program.inputs)
    extra = {op.name: saved.kept[op.name].extra_bytes for op in program.ops}
    recomputed_bytes = recompute_rise = 0
    results: frozenset[str] = frozenset()
    if recompute == "none":
        roots, kept_extra = {root: every[root] for root in inner}, extra
    else:
        roots, kept_extra = {}, {}
        if recompute == "selective":
            roots, kept_extra = kept_storages(program, saved, recomputed)
            results = held_results(program, saved, recomputed)
        left = {name: size - kept_extra.get(name, 0) for name, size in extra.items()}
        second = forward_walk(
            program, saved, roots=inner, extra=left, there=frozenset(roots), stops=True,
            skipped=frozenset() if recompute == "full" else _others(program, recomputed),
        )  # fmt: skip
        copied = (name for name in program.params if program.tensor[name].kind in _COPIED)
        recompute_rise = second + sum(_bytes(program, name) for name in copied)
        recomputed_bytes = sum(left.values()) + sum(
            every[root] for root in inner - frozenset(roots)
        )
    first = forward_walk(program, saved, roots=frozenset(roots), extra=kept_extra)
    edges = {storage[name].root for name in program.outputs}
    again = recompute != "none"
    trained = [
        name
        for name in program.params
        if program.tensor[name].kind == "param" and program.tensor[name].requires_grad
    ]
    return BlockBytes(
        input_names=program.inputs,
        output_names=program.outputs,
        inputs=tuple(
            _edge(
                program, saved, name, is_kept=_is_held(program, name) and (again or name in every)
            )
            for name in program.inputs
        ),
        outputs=tuple(
            _edge(program, saved, name, is_kept=storage[name].root in roots)
            for name in program.outputs
        ),
        params={name: _bytes(program, name) for name in trained},
        param_rows={name: (*program.tensor[name].shape_at(1), 1)[0] for name in trained},
        kept_bytes=sum(kept_extra.values())
        + sum(size for root, size in roots.items() if root not in edges),
        recomputed_bytes=recomputed_bytes,
        forward_rise_bytes=first,
        recompute_rise_bytes=recompute_rise,
        backward=_backward(program, saved, results),
    )


def _backward(
    program: Program, saved: SavedTensors, results: frozenset[str]
) -> Callable[..., BackwardWalk]:
    facts = cache(lambda: backward_facts(program, saved, deferrable_products(program)))
    return cache(lambda **how: backward_walk(facts(), results=results, **how))


def _others(program: Program, recomputed: frozenset[str]) -> frozenset[str]:
    return frozenset(op.name for op in program.ops) - recomputed


def _is_held(program: Program, name: str) -> bool:
    """Whether a kept input is anybody's to free: pieces of the batch are there anyway."""
    return program.tensor[name].kind not in HELD_ANYWAY


def _edge(program: Program, saved: SavedTensors, name: str, *, is_kept: bool) -> Edge:
    root = saved.storages.storage[name].root
    return Edge(
        num_bytes=saved.storages.storage[name].num_bytes,
        requires_grad=program.tensor[name].requires_grad,
        is_kept=is_kept,
        viewed=program.inputs.index(root) if root in program.inputs and root != name else None,
    )


def _bytes(program: Program, name: str) -> int:
    meta = program.tensor[name]
    return meta.numel_at(1) * DTYPE_BYTES[meta.dtype]
