"""What one block holds while it runs forward and backward, storage by storage.

Values at a block's edges depend on its neighbours and are counted by the stage (`exact.stage`).
Here they only count where this block makes, keeps or frees them. All amounts are local bytes.

Both fidelities of memory read the same walks: the exact one places the block in its stage, by
names and with copies of what it takes in another placement (`placed_block`); the bound adds up what
`block_load` takes from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache

from costmodel.memory.block.backward_facts import backward_facts
from costmodel.memory.block.backward_walk import backward_walk
from costmodel.memory.block.deferred_weights import deferred_storages
from costmodel.memory.block.forward_walk import forward_walk
from costmodel.memory.block.fused_facts import compiled_facts, made_late
from costmodel.memory.block.placed_block import BlockBytes, Edge
from costmodel.memory.block.recomputed import kept_of_graphs, kept_storages
from costmodel.memory.parts import ADAMW_STATES
from costmodel.memory.saved import (
    HELD_ANYWAY,
    NOTHING_INSTEAD,
    SavedInstead,
    SavedTensors,
    saved_tensors,
)
from costmodel.time.stage_costs.load import StageLoad
from planner.language.graph import Program, TensorMeta
from planner.language.lowering.experts import spread_params
from planner.language.lowering.narrow_products import gathered_narrow
from planner.language.ops.call import ProductArgs
from planner.language.ops.weight_products import deferrable_products, products_beside
from planner.language.plan import Recompute

_COPIED = frozenset({"buffer", "constant"})
"""Kinds that a block's second run gets as copies, which only its graph refers to."""


def block_bytes(
    program: Program,
    *,
    device_type: str,
    recompute: Recompute,
    recomputed: frozenset[str],
    beside: bool = False,
    is_compiled: bool = False,
    instead: SavedInstead = NOTHING_INSTEAD,
) -> BlockBytes:
    """Return what a bound local program holds; `recomputed` names the ops that run again when
    `recompute` is "selective", `instead` what a backward makes again (`saved_tensors`). `beside`:
    weight gradients are made beside collectives of the backward. `is_compiled`: forward and
    backward are a graph each (`planner.runtime.stage.compiled`).
    """
    if not any(program.tensor[name].requires_grad for name in program.outputs):
        recompute = "none"  # no backward: nothing would read what runs again
    none, every = frozenset[str](), frozenset(op.name for op in program.ops)
    again = {"none": none, "selective": recomputed, "full": every}[recompute]
    # Only autograd refers to the copies that a second run gets, so those it saves count.
    # (The backward of a graph runs again what it needs, without a second run of the block.)
    runs_twice = recompute == "full" or (recompute == "selective" and not is_compiled)
    held_anyway = HELD_ANYWAY - _COPIED if runs_twice else HELD_ANYWAY
    products = deferrable_products(program)
    waits = products_beside(program) if beside else {}

    def holds(names: frozenset[str]) -> BlockBytes:
        """Return what it holds where the weight gradients of these products are deferred."""
        saved = saved_tensors(
            program,
            device_type=device_type,
            deferred=names,
            held_anyway=held_anyway,
            instead=instead,
            is_compiled=is_compiled,
        )
        return _block_bytes(
            saved,
            products,
            again,
            waits,
            recompute=recompute,
            runs_twice=runs_twice,
            is_compiled=is_compiled,
        )

    def deferred() -> BlockBytes | None:
        other = holds(frozenset(products))
        # Where products save the same either way, the stage needs no second kind of this block.
        return None if other.saved.by_op == block.saved.by_op else other

    # Products that wait for a collective save what deferred ones do.
    block = replace(holds(none.union(*waits.values())), deferred=cache(deferred))
    return block


def _block_bytes(
    saved: SavedTensors,
    products: Mapping[str, ProductArgs],
    again: frozenset[str],
    waits: Mapping[str, tuple[str, ...]],
    *,
    recompute: Recompute,
    runs_twice: bool,
    is_compiled: bool,
) -> BlockBytes:
    """Return what a block holds of which the ops named in `again` run twice; `waits` has the
    products whose weight gradients wait for a redistribution's backward.
    """
    program, storage = saved.program, saved.storages.storage
    tensor, all_roots, all_extra = program.tensor, saved.roots, saved.extra
    needed = frozenset(program.inputs if runs_twice else all_roots)
    if is_compiled and not runs_twice:
        kept, needed, again = kept_of_graphs(saved, again)
    else:
        kept = kept_storages(saved, again)
    recomputed_bytes = recompute_rise = 0
    if recompute != "none":
        # The second run makes what the backward needs and the first run did not keep. Inputs lie
        # at the block's edge, where the stage counts them.
        inner = all_roots.keys() - set(program.inputs)
        if not runs_twice:
            late = made_late(saved, products, again)
            inner -= late.inside.union(late.factors)
        extra = {name: size - kept.extra.get(name, 0) for name, size in all_extra.items()}
        recomputed_bytes = sum(extra.values()) + sum(
            all_roots[root] for root in inner - kept.roots.keys()
        )
        skipped = {op.name for op in program.ops} - again
        recompute_rise = forward_walk(
            saved, roots=inner, extra=extra, exist=kept.roots, skipped=skipped, stops=True
        )
        # The walk counts no parameter's storage, so copies of buffers and constants come on top.
        copied = (name for name in program.params if runs_twice and tensor[name].kind in _COPIED)
        recompute_rise += sum(tensor[name].bytes_at(1) for name in copied)
    # Tables with a gradient of rows have no dense gradient: `exact.resident` counts them apart.
    params = [n for n in program.params if tensor[n].kind == "param" and not tensor[n].table]
    sizes = {name: tensor[name].bytes_at(1) for name in params}
    edges = {storage[name].root for name in program.outputs}
    # Pieces of the batch are in memory through the step: no block keeps or frees them. Of the other
    # inputs, a second run needs all.
    kept_inputs = {
        name for name in program.inputs if tensor[name].kind not in HELD_ANYWAY and name in needed
    }
    kept_outputs = {name for name in program.outputs if storage[name].root in kept.roots}
    facts = cache(
        lambda: (
            compiled_facts(
                saved,
                products,
                frozenset() if runs_twice else again,
                {} if runs_twice else kept.roots,
                waits,
            )
            if is_compiled
            else backward_facts(saved, products, kept.results, waits)
        )
    )
    return BlockBytes(
        inputs=tuple(_edge(saved, n, is_kept=n in kept_inputs) for n in program.inputs),
        outputs=tuple(_edge(saved, n, is_kept=n in kept_outputs) for n in program.outputs),
        params={name: size for name, size in sizes.items() if tensor[name].requires_grad},
        frozen={name: size for name, size in sizes.items() if not tensor[name].requires_grad},
        param_shapes={name: tensor[name].shape_at(1) for name in params},
        spread=spread_params(program),
        saved=saved,
        is_compiled=is_compiled,
        # Others may hold an output, too, so outputs count at the stage.
        kept_bytes=kept.num_bytes - sum(kept.roots.get(root, 0) for root in edges),
        recomputed_bytes=recomputed_bytes,
        forward_rise_bytes=forward_walk(
            saved, roots=kept.roots, extra=kept.extra, lasting=kept.read
        ),
        recompute_rise_bytes=recompute_rise,
        # Microbatches and positions in the stage differ in few options, so few walks are made.
        backward=cache(lambda **how: backward_walk(facts(), **how)),
    )


def _edge(saved: SavedTensors, name: str, *, is_kept: bool) -> Edge:
    program, storage = saved.program, saved.storages.storage[name]
    is_view = storage.root in program.inputs and storage.root != name
    return Edge(
        name=name,
        num_bytes=storage.num_bytes,
        requires_grad=program.tensor[name].requires_grad,
        is_kept=is_kept,
        viewed=program.inputs.index(storage.root) if is_view else None,
    )


def rest_bytes(meta: TensorMeta) -> int:
    """Return the bytes that a tensor without a dense gradient takes at least through a step: of a
    table with a gradient of rows its moments, too (in bf16 its master comes on top).
    """
    return meta.bytes_at(1) * (1 + ADAMW_STATES * bool(meta.table))


def late_bytes(block: BlockBytes) -> int:
    """Return the bytes that a block's weight gradients refer to at least for each microbatch, where
    they are made in jobs of their own: from the job of its input gradients until theirs.

    Recomputed or not, these are the same. What lies at the block's edges counts for nothing, as its
    neighbours may hold it, too.
    """
    program = block.saved.program
    held = deferred_storages((block.deferred() or block).backward(first=False, split=True).deferred)
    at_edges = {*program.inputs, *(f"gradient {name}" for name in program.outputs)}
    return sum(size for name, size in held.items() if name not in at_edges)


def backward_bytes(block: BlockBytes) -> int:
    """Return the bytes that a block's backward takes at least beside all that the block saves, kept
    or made again: the gradients of its outputs, and what the backward rises above its start.
    """
    program = block.saved.program
    arrive = sum(edge.num_bytes for edge in block.outputs if edge.requires_grad)
    if not arrive:
        return 0
    # What no other block holds is freed early; which weight gradients are late is the schedule's.
    options = {"first": False, "freed_inputs": frozenset(program.inputs)}
    return arrive + min(block.backward(**options, split=late).rise_bytes for late in (False, True))


def block_load(block: BlockBytes, recomputed: Collection[str]) -> StageLoad:
    """Return the bytes of a block as a run of blocks sums them up: what the bound of memory reads.

    `block` is without recomputation; `recomputed` names the ops that run again where it is
    selective. The activation inputs stay resident until the block's backward, saved by autograd or
    not: their gradients are left where they are.
    """
    saved, tensor = block.saved, block.saved.program.tensor
    activations = [edge for edge in block.inputs if edge.requires_grad]
    # Blocks of a run share side inputs, so a run takes them once and not with what each block
    # saves.
    side = sum(edge.num_bytes for edge in block.inputs if edge.is_kept and not edge.requires_grad)
    input_bytes = sum(edge.num_bytes for edge in activations)
    arriving = {edge.name for edge in block.outputs if edge.requires_grad}
    # Blocks without a backward are not recomputed.
    again = recomputed if arriving else ()
    kept = kept_of_graphs(saved, again).kept if block.is_compiled else kept_storages(saved, again)
    params = saved.program.params
    frozen_param_bytes = sum(block.frozen.values())
    spread = [size for name, size in block.params.items() if name in block.spread]
    return StageLoad(
        saved_bytes=saved.num_bytes - side,
        input_bytes=input_bytes,
        selective_bytes=input_bytes + kept.num_bytes,
        side_bytes=side,
        tail_bytes=sum(tensor[name].bytes_at(1) for name in saved.outputs),
        param_bytes=sum(block.params.values()),
        frozen_bytes=sum(rest_bytes(tensor[name]) for name in params if name not in block.params),
        frozen_param_bytes=frozen_param_bytes,
        # A block that no gradient reaches gathers no weights again for a backward.
        frozen_backward_bytes=frozen_param_bytes * bool(arriving),
        # Of a run the maximum over its blocks: buckets on the host are as large as that.
        largest_param_bytes=sum(block.params.values()),
        num_params=len(block.params),
        spread_bytes=sum(spread),
        num_spread=len(spread),
        narrow_bytes=sum(block.params.get(name, 0) for name in gathered_narrow(saved.program)),
    )
