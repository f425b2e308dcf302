"""Which layers of a model multiply in 8 bits, and why a stack can't have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.language.graph import Op, Program, TensorMeta
from planner.language.lowering.narrow_products import in_tiles
from planner.language.lowering.routed_experts import router_weights
from planner.language.ops.families.products.narrow import TILES, scaling_of
from planner.language.ops.record import family_of
from planner.language.plan.parts import Precision, scaling_named
from planner.language.stacks.layered import LayeredModel
from planner.language.stacks.stack import Stack

Width = Literal["8 bits", "16 bits", "broken tiles"]
"""How a weight is multiplied: in 8 bits; in 16, though its dims are whole tiles; or in 16, as they
are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidths:
    """How a layer's weights are multiplied, that of a router apart."""

    linear: frozenset[Width]
    """Of its linear layers."""
    experts: frozenset[Width]
    """Of the matrices of its experts."""


def tile_of(precision: Precision) -> int:
    """Return what dims of products in 8 bits are multiples of, of a precision that has them."""
    return TILES[scaling_named(precision)]


def widths_of_layers(model: LayeredModel, tile: int) -> tuple[LayerWidths, ...]:
    """Return how each layer multiplies, where products in 8 bits are of whole tiles. Raises
    PlanError for a model that is no chain of layers.
    """
    found: list[tuple[set[Width], set[Width]]] = [(set(), set()) for _ in range(model.num_layers)]
    for block in model.graph.blocks:
        layer = model.layer_of_block[block.index]
        if layer is not None:
            linear, experts = _widths(model.graph.classes[block.class_index], tile)
            found[layer][0].update(linear)
            found[layer][1].update(experts)
    return tuple(
        LayerWidths(linear=frozenset(linear), experts=frozenset(experts))
        for linear, experts in found
    )


def _widths(program: Program, tile: int) -> tuple[set[Width], set[Width]]:
    routers = router_weights(program)
    made_of = {name for name in program.params if program.tensor[name].kind == "param"}
    linear: set[Width] = set()
    experts: set[Width] = set()
    for op in program.ops:
        family = family_of(op.target)
        if op.inputs and made_of.issuperset(op.inputs):
            made_of.update(op.outputs)  # a transpose or a cast of a parameter
        elif family.arithmetic == "matmul":
            _, weight = op.inputs[family.first_factor :][:2]
            if family.deals_rows:
                experts.add(_width(op, program.tensor[weight], tile))
            elif weight in made_of - routers:
                linear.add(_width(op, program.tensor[weight], tile))
    return linear, experts


def _width(op: Op, weight: TensorMeta, tile: int) -> Width:
    if scaling_of(op):
        return "8 bits"
    return "16 bits" if in_tiles(weight, tile) else "broken tiles"


def wide_layers(layers: Sequence[LayerWidths]) -> tuple[int, ...]:
    """Return the layers of which some linear layer might be in 8 bits, and is not."""
    return tuple(number for number, layer in enumerate(layers) if "16 bits" in layer.linear)


def experts_are_narrow(layers: Sequence[LayerWidths]) -> bool:
    """Whether some layer multiplies the matrices of its experts in 8 bits."""
    return any("8 bits" in layer.experts for layer in layers)


def narrow_layers(layers: Sequence[LayerWidths]) -> tuple[int, ...]:
    """Return the layers that have linear layers in 8 bits."""
    return tuple(number for number, layer in enumerate(layers) if "8 bits" in layer.linear)


def why_not_narrow(stack: Stack, layers: Sequence[LayerWidths], precision: Precision) -> str:
    """Why a stack can't multiply in 8 bits what these layers do, and nothing else; empty where it
    can.
    """
    is_named = precision in stack.converts_named
    if is_named and any(layer.experts for layer in layers):
        return f"{stack.title} would convert routers of experts beside linear layers to {precision}"
    for number, layer in enumerate(layers):
        kinds = (("linear layers", layer.linear), ("experts", layer.experts))
        if stack.narrow_layers == "all":
            for what, widths in kinds:
                if other := widths - {"8 bits"}:
                    return (
                        f"{stack.title} multiplies in 8 bits whatever a layer has, and some "
                        f"{what} of layer {number} are in 16{_tiles(other, precision)}"
                    )
        elif {"8 bits", "16 bits"} <= layer.linear or (
            is_named and {"8 bits", "broken tiles"} <= layer.linear
        ):
            return (
                f"{stack.title} leaves whole layers in 16 bits, and of layer {number} some linear "
                f"layers are in 16 bits{_tiles(layer.linear, precision)}"
            )
    of_experts = {width for layer in layers for width in layer.experts}
    if "8 bits" in of_experts and not stack.narrow_experts:
        return f"{stack.title} has experts in 16 bits alone"
    if "8 bits" in of_experts and len(of_experts) > 1:
        return f"{stack.title} multiplies all experts in 8 bits or none, and the plan some"
    return ""


def _tiles(widths: frozenset[Width], precision: Precision) -> str:
    if "broken tiles" not in widths:
        return ""
    return f", as their dims are no multiples of {tile_of(precision)}"


def why_not_rows(stack: Stack, rows: int, precision: Precision) -> str:
    """Why a stack can't multiply so many rows of a microbatch on a rank in 8 bits."""
    tile = tile_of(precision)
    if rows % tile == 0:
        return ""
    return (
        f"{stack.title} multiplies rows in 8 bits in multiples of {tile}, and a microbatch has "
        f"{rows} on a rank"
    )
