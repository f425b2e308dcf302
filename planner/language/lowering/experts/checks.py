"""Whether a model's experts can lie on ranks of ep: what divides them, and whose rows are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, Program
from planner.language.graph.called_modules import called_whole
from planner.language.layout.axes import Degrees, check_experts_mesh, lowered_axes
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Shard
from planner.language.lowering.experts.weights import (
    check_placed,
    grouped_products,
    weights_of_experts,
)
from planner.language.ops.record import family_of


def check_experts(graph: ModelGraph, degrees: Degrees) -> None:
    """Raise LayoutError where a model's experts cannot lie on the experts' mesh of these sizes."""
    if degrees.expert_parts > 1:
        check_experts_parts(graph, degrees["ep"], degrees["etp"])
        check_experts_mesh(degrees)


def check_experts_parts(graph: ModelGraph, ep: int, etp: int = 1) -> None:
    """Raise LayoutError where a model has no experts that `ep` divides."""
    if ep * etp == 1:
        return
    if not any(grouped_products(program) for program in graph.classes):
        raise LayoutError(
            f"ep={ep} etp={etp} was given, and experts are recognised by products of runs of rows "
            f"(grouped_mm), of which the model has none{_not_recognised(graph)}; use ep=1 and "
            "etp=1, or multiply experts by torch.nn.functional.grouped_mm"
        )
    for program in graph.classes:
        check_placed(program, f"ep={ep} etp={etp}")
    if experts_of(graph) % ep:
        raise LayoutError(
            f"ep={ep} does not divide the experts of each block, {experts_of(graph)}; use a divisor"
        )


def _not_recognised(graph: ModelGraph) -> str:
    """Return what of a model without grouped products may be experts; "" where nothing is."""
    found = dict.fromkeys(name for program in graph.classes for name in stacked_matrices(program))
    met = f" (all rows meet all matrices of {', '.join(found)}, which tp divides)" if found else ""
    return called_whole(graph) or met


def stacked_matrices(program: Program) -> Iterator[str]:
    """Yield the names of parameters of several matrices that a product takes."""
    source = {name: name for name in program.params}
    for op in program.ops:
        family = family_of(op.target)
        if family.across.algebra == "rearrangement" and source.keys() >= {*op.inputs}:
            source |= {made: source[name] for made in op.outputs for name in op.inputs}
        for name in op.inputs if family.arithmetic == "matmul" else ():
            meta = program.tensor[source.get(name, name)]
            if name in source and len(meta.shape) > 2:
                yield meta.fqn or meta.name


def experts_of(graph: ModelGraph) -> int:
    """Return the largest number that divides the experts of each block that has some; 1 without,
    and where their weights cannot lie on ranks of their own.
    """
    found = [each for program in graph.classes for each in weights_of_experts(program)]
    if any(each.why_not for each in found):
        return 1
    return gcd(*(each.experts for each in found)) or 1


def cuts_rows(program: Program, layout: ClassLayout | None) -> bool:
    """Whether each rank of a layout's axis has experts' rows of its own; `program` is the block's,
    unlowered.
    """
    placed = {} if layout is None else layout.op_shardings
    shardings = [placed.get(op.name) for op in grouped_products(program)]
    taken = [sharding.inputs[0] for sharding in shardings if sharding is not None]
    return len(taken) == len(shardings) and all(
        isinstance(rows, Shard) and rows.dim == 0 for rows in taken
    )


def check_rows(program: Program, layouts: Mapping[str, ClassLayout], degrees: Degrees) -> None:
    """Raise LayoutError where ranks of one experts' group would send the same rows twice.

    `program` is a block's, unlowered, and `layouts` are its own by axis. On an axis whose ranks are
    in one group of ep each has rows of its own. On tp with etp ranks send the same rows, each to
    the ranks with its part of the matrices.
    """
    if degrees["ep"] == 1 or not grouped_products(program):
        return
    for axis in lowered_axes():
        size, etp = degrees[axis.name], degrees["etp"]
        if size == 1:
            continue
        own = cuts_rows(program, layouts.get(axis.name))
        given = f"ep={degrees['ep']} etp={etp} with {axis.name}={size}"
        if axis.whole_params and not own:
            raise LayoutError(
                f"{given}: all ranks of {axis.name} would send the same rows; use {axis.name}=1"
            )
        if not axis.whole_params and own != (etp == 1):
            are = "each have rows of their own" if own else "have the same rows of experts"
            raise LayoutError(f"{given}: ranks of {axis.name} {are}; use etp={1 if own else size}")
