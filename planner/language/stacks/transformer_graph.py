"""What a graph tells of a transformer: its layers, its sizes, the order of its products."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.language.graph import ModelGraph, Op, Program, Size
from planner.language.lowering.experts import grouped_products
from planner.language.lowering.routed_experts import router_weights, routings
from planner.language.ops.families.products.masked_attention import MASKED
from planner.language.ops.record import packet_of

_LAYER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")

_CORE_ATTENTION = ("core_attention", "softmax", "attention_dropout")
"""Modules between the product that makes queries, keys and values and that of the output."""

_CASTS = ("aten.to.", "aten._to_copy.")
"""Ops of which the result is the stream in another dtype, or in its own."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a transformer, as far as its graph tells them; 0 where it does not."""

    layers: int
    """Number of layers."""
    hidden: int
    """Width of what goes from layer to layer."""
    seq_len: int
    """Tokens of a sample."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values."""
    ffn_hidden: int
    """Width of a feed-forward without experts."""
    gated: bool
    """Whether the feed-forward has three matrices."""
    vocab: int
    """Entries of the vocabulary."""
    tied: bool
    """Whether the head's matrix is the embedding's."""
    experts: Experts | None = None
    """Its experts, where their routing is told."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a transformer whose layers, where they have some, have the same."""

    number: int
    """Experts of a layer."""
    chosen: int
    """Experts of a token."""
    hidden: int
    """Width inside an expert."""
    shared_hidden: int
    """Width of the feed-forward that all tokens take beside them; 0 without."""
    layers: tuple[bool, ...]
    """Which layers have some."""


def layer_of_block(graph: ModelGraph) -> tuple[int | None, ...]:
    """Return the number of the layer that each block belongs to; None before and behind them.

    Raises PlanError for a model that is no chain of numbered layers.
    """
    found = [_LAYER.match(block.name) for block in graph.blocks]
    roots = {match[1] for match in found if match}
    numbers = tuple(int(match[2]) if match else None for match in found)
    inside = [n for n in numbers if n is not None]
    first = next((at for at, n in enumerate(numbers) if n is not None), 0)
    inner = numbers[first : first + len(inside)]
    if len(roots) != 1 or None in inner or inside != sorted(inside) or inside[0]:
        raise PlanError(
            f"{graph.name} is no chain of numbered layers between an embedding and a head "
            f"(its blocks: {', '.join(block.name for block in graph.blocks[:4])}, ...), which "
            "systems for such models need; emit a launch script for this runtime instead"
        )
    return numbers


def sizes_of(graph: ModelGraph) -> Sizes:
    """Return the sizes of a transformer, as far as its graph tells them.

    Raises PlanError for a model that is no chain of numbered layers.
    """
    of_block = layer_of_block(graph)
    layer = next(block for block in graph.blocks if of_block[block.index] is not None)
    program = graph.classes[layer.class_index]
    width = program.tensor[program.outputs[0]].shape[-1]
    heads, head_dim, before, behind = _products(program)
    kv_heads, ffn_hidden, gated = 0, 0, False
    if head_dim and len(before) in (1, 3):  # queries, keys and values as one product or as three
        rows = [rows for rows, _ in before]
        kv_heads = (rows[1] if len(before) == 3 else (rows[0] - heads * head_dim) // 2) // head_dim
    if len(behind) > 1 and not routes(program):
        ffn_hidden = behind[-1][1]
        gated = len(behind) == 3 or behind[0][0] == 2 * ffn_hidden
    lengths = {
        shape[1]
        for shape in (graph.tensor[name].shape for name in graph.batch_inputs)
        if len(shape) == 2
    }
    length = lengths.pop() if len(lengths) == 1 else 0
    return Sizes(
        layers=1 + max(n for n in of_block if n is not None),
        hidden=_number(width),
        seq_len=_number(length),
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        gated=gated,
        vocab=_vocab(graph),
        tied=bool(graph.shared_params.keys() & set(graph.blocks[0].params)),
        experts=_experts(graph, of_block),
    )


def _experts(graph: ModelGraph, of_block: Sequence[int | None]) -> Experts | None:
    """Return the experts that all layers with some have; None where they differ, or no routing is
    told.
    """
    number_of_layers = 1 + max(n for n in of_block if n is not None)
    found, has_some = set(), [False] * number_of_layers
    for block in graph.blocks:
        program, layer = graph.classes[block.class_index], of_block[block.index]
        told = routings(program)
        if layer is None or not told:
            continue
        has_some[layer] = True
        products = grouped_products(program)
        width = _number(program.tensor[products[-1].inputs[0]].shape[-1]) if products else 0
        found.add((*told[0], width, _shared_hidden(program)))
    if len(found) != 1:
        return None
    ((number, chosen, hidden, shared_hidden),) = found
    return Experts(
        number=number,
        chosen=chosen,
        hidden=hidden,
        shared_hidden=shared_hidden,
        layers=tuple(has_some),
    )


def _shared_hidden(program: Program) -> int:
    """Return the width of a feed-forward beside a layer's experts; 0 without."""
    routers = {tuple(map(_number, program.tensor[name].shape)) for name in router_weights(program)}
    # A product of one row weighs what the feed-forward makes.
    behind = [sizes for sizes in _products(program)[3] if sizes not in routers and sizes[0] > 1]
    return behind[-1][1] if len(behind) in (2, 3) else 0


def _products(
    program: Program,
) -> tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a layer's heads and their width, and (rows, columns) of the weights of its products:
    of those that make queries, keys and values, and of those of its feed-forward.
    """
    heads = head_dim = 0
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for op in program.ops:
        if "scaled_dot_product" in op.target or op.target == MASKED:
            shape = program.tensor[op.inputs[0]].shape
            heads, head_dim = _number(shape[1]), _number(shape[3])
        elif packet_of(op.target) == "linear":
            rows, columns = (_number(size) for size in program.tensor[op.inputs[1]].shape)
            found[bool(heads)].append((rows, columns))
    return heads, head_dim, found[0], found[1][1:]  # the first behind attention joins its heads


def _vocab(graph: ModelGraph) -> int:
    program = graph.classes[graph.blocks[0].class_index]
    lookups = (op for op in program.ops if op.target.startswith("aten.embedding"))
    return max((_number(program.tensor[op.inputs[0]].shape[0]) for op in lookups), default=0)


def _number(size: Size) -> int:
    return size if isinstance(size, int) else 0


def routes(program: Program) -> bool:
    """Whether a block sends its tokens to experts."""
    return any("topk" in op.target for op in program.ops)


def is_core_attention(op: Op) -> bool:
    """Whether an op lies between the products of queries, keys, values and that of the output."""
    return op.module.rpartition(".")[2] in _CORE_ATTENTION


def usual_dims(program: Program, *, is_layer: bool) -> Iterator[tuple[str, int | None]]:
    """Yield weights of a block with the dim that tensor parallelism splits; None: it splits none.

    A product whose input does not depend on another product of the block reads the stream: sums
    with the stream are the stream again. In front of attention the last products on the way are
    split by their heads, and what they are made of (the narrow queries and keys of latent
    attention) is whole on every rank.
    """
    sums = _sums_with_stream(program)
    ahead = _ahead_of_attention(program, sums)
    products = dict.fromkeys(program.inputs, 0)
    for op in program.ops:
        behind = max((products.get(name, 0) for name in op.inputs), default=0)
        if op.name in sums:
            behind = 0
        if op.target.startswith("aten.embedding"):
            if op.inputs[0] in program.params:  # not a table of sines, say
                yield op.inputs[0], 0
        elif _is_product(op, program):
            if is_layer and ahead.get(op.name, 0) > 1:
                yield op.inputs[1], None
            else:
                is_last = is_layer and behind and op.name not in ahead
                yield op.inputs[1], 1 if is_last else 0
            behind = 1
        elif _is_attention(op):
            behind = 1
        products |= dict.fromkeys(op.outputs, behind)


def _is_product(op: Op, program: Program) -> bool:
    return packet_of(op.target) == "linear" and op.inputs[1] in program.params


def _is_attention(op: Op) -> bool:
    return "attention" in op.target


def _sums_with_stream(program: Program) -> frozenset[str]:
    """Return the sums that hand the stream on, by name."""
    stream, sums = set(program.inputs), set()
    for op in program.ops:
        is_sum = op.target.startswith("aten.add")
        if (is_sum or op.target.startswith(_CASTS)) and stream & set(op.inputs):
            stream.update(op.outputs)
            if is_sum:
                sums.add(op.name)
    return frozenset(sums)


def _ahead_of_attention(program: Program, sums: Collection[str]) -> dict[str, int]:
    """Return the products that queries, keys and values are made by, each with how many products
    lie on the longest way from it to attention, itself counted. No way leads through the stream.
    """
    count: dict[str, int] = {}  # by value, of the ways behind it
    found = {}
    for op in reversed(program.ops):
        ways = [count[name] for name in op.outputs if name in count]
        if _is_attention(op):
            ways = [0]
        if not ways or op.name in sums:
            continue
        most = max(ways)
        if _is_product(op, program):
            most += 1
            found[op.name] = most
        for name in op.inputs:
            count[name] = max(most, count.get(name, 0))
    return found
