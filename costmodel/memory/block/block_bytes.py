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
from costmodel.memory.block.recomputed import kept_storages
from costmodel.memory.saved import (
    HELD_ANYWAY,
    NOTHING_INSTEAD,
    SavedInstead,
    SavedTensors,
    saved_tensors,
)
from planner.graph import Program
from planner.layout.experts import spread_params
from planner.ops.weight_products import ProductArgs, deferrable_products
from planner.plan import Recompute

_COPIED = frozenset({"buffer", "constant"})
"""Kinds that a block's second run gets as copies, which only its graph refers to."""


class Edge(NamedTuple):
    """A value a block takes or makes."""

    name: str
    """Its local name."""
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

    inputs: tuple[Edge, ...]
    """The activations it takes."""
    outputs: tuple[Edge, ...]
    """The activations it makes."""
    params: Mapping[str, int]
    """Bytes of trained parameters, by local name."""
    frozen: Mapping[str, int]
    """Bytes of frozen parameters, by local name."""
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
    spread: frozenset[str] = frozenset()
    """Those of its parameters that lie on the experts' mesh."""
    deferred: BlockBytes | None = None
    """The block with its weight gradients deferred, if it keeps other things then."""


def block_bytes(
    program: Program,
    *,
    device_type: str,
    recompute: Recompute,
    recomputed: frozenset[str],
    instead: SavedInstead = NOTHING_INSTEAD,
) -> BlockBytes:
    """Return what a bound local program holds; `recomputed` names the ops that run again when
    `recompute` is "selective", `instead` what a backward makes again (`saved_tensors`).
    """
    if not any(program.tensor[name].requires_grad for name in program.outputs):
        recompute = "none"  # no backward: nothing would read what runs again
    none, every = frozenset[str](), frozenset(op.name for op in program.ops)
    again = {"none": none, "selective": recomputed, "full": every}[recompute]
    held_anyway = HELD_ANYWAY if recompute == "none" else HELD_ANYWAY - _COPIED
    products = deferrable_products(program)
    saved, deferred = (
        saved_tensors(
            program,
            device_type=device_type,
            deferred=names,
            held_anyway=held_anyway,
            instead=instead,
        )
        for names in (none, frozenset(products))
    )
    block = _block_bytes(saved, products, again, is_recomputed=recompute != "none")
    if deferred.by_op == saved.by_op:
        return block
    other = _block_bytes(deferred, products, again, is_recomputed=recompute != "none")
    return replace(block, deferred=other)


def _block_bytes(
    saved: SavedTensors,
    products: Mapping[str, ProductArgs],
    again: frozenset[str],
    *,
    is_recomputed: bool,
) -> BlockBytes:
    """Return what a block holds of which the ops named in `again` run twice."""
    program, storage = saved.storages.program, saved.storages.storage
    tensor, all_roots, all_extra = program.tensor, saved.roots, saved.extra
    kept = kept_storages(saved, again)
    recomputed_bytes = recompute_rise = 0
    if is_recomputed:
        # The second run makes what the backward needs and the first run did not keep.
        inner = all_roots.keys() - set(program.inputs)
        extra = {name: size - kept.extra.get(name, 0) for name, size in all_extra.items()}
        recomputed_bytes = sum(extra.values()) + sum(
            all_roots[root] for root in inner - kept.roots.keys()
        )
        skipped = {op.name for op in program.ops} - again
        recompute_rise = forward_walk(
            saved, roots=inner, extra=extra, exist=kept.roots, skipped=skipped, stops=True
        )
        copied = (name for name in program.params if tensor[name].kind in _COPIED)
        recompute_rise += sum(tensor[name].bytes_at(1) for name in copied)
    params = [n for n in program.params if tensor[n].kind == "param"]
    sizes = {name: tensor[name].bytes_at(1) for name in params}
    edges = {storage[name].root for name in program.outputs}
    # Pieces of the batch are in memory through the step: nobody keeps or frees them. Of the other
    # inputs, a second run needs all.
    kept_inputs = {
        name
        for name in program.inputs
        if tensor[name].kind not in HELD_ANYWAY and (is_recomputed or name in all_roots)
    }
    kept_outputs = {name for name in program.outputs if storage[name].root in kept.roots}
    facts = cache(lambda: backward_facts(saved, products, kept.results))
    return BlockBytes(
        inputs=tuple(_edge(saved, n, is_kept=n in kept_inputs) for n in program.inputs),
        outputs=tuple(_edge(saved, n, is_kept=n in kept_outputs) for n in program.outputs),
        params={name: size for name, size in sizes.items() if tensor[name].requires_grad},
        frozen={name: size for name, size in sizes.items() if not tensor[name].requires_grad},
        param_rows={name: (*tensor[name].shape_at(1), 1)[0] for name in params},
        spread=spread_params(program),
        kept_bytes=kept.num_bytes - sum(kept.roots.get(root, 0) for root in edges),
        recomputed_bytes=recomputed_bytes,
        forward_rise_bytes=forward_walk(saved, roots=kept.roots, extra=kept.extra),
        recompute_rise_bytes=recompute_rise,
        backward=cache(lambda **how: backward_walk(facts(), **how)),
    )


def _edge(saved: SavedTensors, name: str, *, is_kept: bool) -> Edge:
    program, storage = saved.storages.program, saved.storages.storage[name]
    is_view = storage.root in program.inputs and storage.root != name
    return Edge(
        name=name,
        num_bytes=storage.num_bytes,
        requires_grad=program.tensor[name].requires_grad,
        is_kept=is_kept,
        viewed=program.inputs.index(storage.root) if is_view else None,
    )


def peak_bytes(saved: SavedTensors, products: Mapping[str, ProductArgs]) -> tuple[int, int]:
    """Return the highest bytes alive in a forward and in a backward of a program alone, which has
    those `deferrable_products`.

    The forward starts from nothing of this program alive; its inputs are not counted. The backward
    starts with everything saved, and with the gradients of the outputs, and counts both. It counts
    a parameter's gradient as long as its op runs.
    """
    facts = backward_facts(saved, products)
    rise = backward_walk(facts, first=False).rise_bytes
    return (
        forward_walk(saved, roots=saved.roots, extra=saved.extra),
        facts.saved_bytes + sum(facts.outputs.values()) + rise,
    )
