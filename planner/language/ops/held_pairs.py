"""Attention that makes tensors with an entry for each pair of positions, and what these cost.

Two kinds are left once masks were told (`planner.capture.masks`): attention that takes a mask which
was not recognised, and attention that is written out, as a product, a softmax and a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.language.graph import ModelGraph, Op, Program
from planner.language.ops.record import family_of, packet_of
from planner.units import format_bytes

_SDPA = "scaled_dot_product_attention"
_FEW = 3
"""Blocks that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPairs:
    """Attention of a kind of block that holds pairs of positions."""

    kind: Literal["mask", "scores"]
    """What of the pairs is held: the mask alone, or scores too."""
    line: str
    """The user's code, or nothing."""
    blocks: tuple[str, ...]
    """The blocks that have it."""
    queries: int
    """Positions of queries."""
    keys: int
    """Positions of keys."""
    num_tensors: int
    """Tensors of pairs that one block makes or takes."""
    num_bytes: int
    """Bytes of these together, for a sample."""


def held_pairs(graph: ModelGraph) -> tuple[HeldPairs, ...]:
    """Return what attention of a captured model holds of pairs of positions, by class of blocks."""
    found: list[HeldPairs] = []
    for index, program in enumerate(graph.classes):
        blocks = tuple(block.name for block in graph.blocks if block.class_index == index)
        maker = {name: op for op in program.ops for name in op.outputs}
        for op in program.ops:
            held = _of_mask(op, program) or _of_scores(op, program, maker)
            if held is not None:
                kind, names = held
                sizes = program.tensor[names[0]].shape_at(1)
                found.append(
                    HeldPairs(
                        kind=kind,
                        line=op.line,
                        blocks=blocks,
                        queries=sizes[-2],
                        keys=sizes[-1],
                        num_tensors=len(names),
                        num_bytes=sum(program.tensor[name].bytes_at(1) for name in names),
                    )
                )
    return tuple(found)


def held_pairs_messages(graph: ModelGraph) -> tuple[str, ...]:
    """Say which attention holds pairs of positions and what they cost, in a line for each kind."""
    messages: dict[str, None] = {}
    for held in held_pairs(graph):
        blocks = ", ".join(held.blocks[:_FEW])
        blocks += f" and {len(held.blocks) - _FEW} more" * (len(held.blocks) > _FEW)
        where = f"attention of {blocks}{f' at {held.line}' if held.line else ''}"
        size = f"{format_bytes(held.num_bytes)} a sample"
        pairs = f"all {held.queries} x {held.keys} pairs are computed"
        if held.kind == "mask":
            text = (
                f"{where} takes a mask that is not recognised: {size}, and {pairs}; masks that "
                "compare positions, or numbers of documents, without dropout, take none of it"
            )
        else:
            text = (
                f"{where} is written out: {held.num_tensors} tensors of pairs take {size}, and "
                f"{pairs}; scaled_dot_product_attention makes none of them"
            )
        messages[text] = None
    return tuple(messages)


Held = tuple[Literal["mask", "scores"], tuple[str, ...]] | None


def _of_mask(op: Op, program: Program) -> Held:
    """The mask of an op that takes one for each pair."""
    if packet_of(op.target) != _SDPA or len(op.inputs) < 4:
        return None
    sizes = program.tensor[op.inputs[3]].shape_at(1)
    return ("mask", (op.inputs[3],)) if min(sizes[-2:], default=1) > 1 else None


def _of_scores(op: Op, program: Program, maker: Mapping[str, Op]) -> Held:
    """The tensors between a product of two activations and the softmax of its scores."""
    shape = program.tensor[op.outputs[0]].shape
    if packet_of(op.target) not in ("softmax", "_softmax") or len(shape) < 3:
        return None
    pairs = shape[-2:]
    names = [op.outputs[0]]
    waiting = [*op.inputs]
    is_attention = False
    # From the softmax back over tensors with an entry for each pair, to the product that made them.
    while waiting:
        name = waiting.pop()
        made = maker.get(name)
        if made is None or name in names or program.tensor[name].shape[-2:] != pairs:
            continue
        names.append(name)
        if family_of(made.target).arithmetic == "matmul":
            # A product with a weight makes logits of classes and no scores.
            is_attention |= not set(made.inputs) & set(program.params)
        else:
            waiting += made.inputs
    return ("scores", tuple(names)) if is_attention else None
