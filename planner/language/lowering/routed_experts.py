"""What to tell of a model's experts: whose routing is told, and whose every rank does whole."""

from __future__ import annotations

from collections.abc import Sequence

from planner.language.graph import ModelGraph, Op, Program
from planner.language.lowering.experts import stacked_matrices
from planner.language.ops.families.entries.routing import SORT_ROWS
from planner.language.ops.record import family_of, packet_of

_FEW = 3
"""Blocks that a message names."""


def routing_messages(graph: ModelGraph) -> tuple[str, ...]:
    """Return a line for blocks whose experts' rows ranks may sort each on its own, by number of
    experts, one for products of runs of rows whose order is not recognised, and one for blocks in
    which all rows meet the matrices of all experts.
    """
    told: dict[tuple[int, int], list[str]] = {}
    untold: dict[str, list[str]] = {}
    dense: dict[str, list[str]] = {}
    for index, program in enumerate(graph.classes):
        blocks = [block.name for block in graph.blocks if block.class_index == index]
        for sizes in dict.fromkeys(routings(program)):
            told.setdefault(sizes, []).extend(blocks)
        for line in dict.fromkeys(op.line for op in _of_unknown_rows(program)):
            untold.setdefault(line, []).extend(blocks)
        if not told and not untold and any(packet_of(op.target) == "topk" for op in program.ops):
            for name in dict.fromkeys(stacked_matrices(program)):
                dense.setdefault(name.rpartition(".")[2], []).extend(blocks)
    return (
        *(
            f"{_named(blocks)}: {number} experts, {copies} a token; each rank may route rows of "
            "its own"
            for (number, copies), blocks in told.items()
        ),
        *(
            f"{_named(blocks)}{f' at {line}' if line else ''}: it is not recognised how rows are "
            "sorted by their experts, so every rank of tp and cp sorts and holds all rows; see "
            "docs/sharding.md for the forms that are"
            for line, blocks in untold.items()
        ),
        *(
            f"{_named(blocks)}: all rows meet all matrices of {name}, whichever a router chose; tp "
            "divides them, and ep does not"
            for name, blocks in dense.items()
        ),
    )


def routings(program: Program) -> list[tuple[int, int]]:
    """Return the number of experts and of those of a row, of each routing that is told."""
    found = []
    for op in program.ops:
        if op.target == SORT_ROWS:
            chosen = program.tensor[op.inputs[1]].shape_at(1)
            found.append((int(op.args[2]), chosen[1] if len(chosen) > 1 else 1))  # type: ignore[arg-type]
    return found


def router_weights(program: Program) -> frozenset[str]:
    """Return the weights of the products whose results say which experts a token is sent to."""
    makers = {name: op for op in program.ops for name in op.outputs}
    found = set()
    for op in program.ops:
        maker: Op | None = op if "topk" in op.target else None
        while maker is not None and packet_of(maker.target) != "linear":
            maker = makers.get(maker.inputs[0]) if maker.inputs else None
        if maker is not None:
            found.add(maker.inputs[1])
    return frozenset(found)


def _of_unknown_rows(program: Program) -> list[Op]:
    """Return the products of runs of rows whose ends the block makes by other than `sort_rows`."""
    makers = {name: op for op in program.ops for name in op.outputs}
    products = [op for op in program.ops if family_of(op.target).deals_rows]
    made = [makers.get(op.inputs[2]) for op in products]
    return [
        op
        for op, maker in zip(products, made, strict=True)
        if maker is not None and maker.target != SORT_ROWS
    ]


def _named(blocks: Sequence[str]) -> str:
    more = f" and {len(blocks) - _FEW} more" * (len(blocks) > _FEW)
    return f"{', '.join(blocks[:_FEW])}{more}"
