"""Attention of sequences that an axis cuts: what a rank has of it, by the layouts of its blocks.

    queries   of its positions, for which it gathers keys and values (`S(2),R,R->S(2)`)
    heads     some, with all positions: heads and positions change places before attention and
              behind it, by all-to-all (`S(1),S(1),S(1)->S(1)`)
    ring      queries of its positions; keys and values go round from rank to rank, and are nowhere
              whole (`S(2),S(2),S(2)->S(2)`)

A causal query meets the keys before it. So of n ranks with one piece of the sequence each, the
last has 2 - 1/n of the mean work; with k pieces on each rank (`S(1)xk` between blocks; striped
attention, Brandon et al. 2023, arXiv 2311.09431) the fullest rank has 1 + (1 - 1/n) / k of it, also
over a ring. With two pieces, of which one is as far from the end as the other from the start
(`S(1)z2`, zig-zag), all ranks have the mean, as they have by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, Op, Program
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import OpSharding, Placement, Shard, parse_placement
from planner.language.layout.sequences import can_be_filled_up, longest_sequence
from planner.language.ops.record import family_of
from planner.language.ops.registry import strategies
from planner.language.plan import Plan

AttentionBy = Literal["queries", "heads", "ring"]
"""What each rank has of attention where sequences are cut."""

MayLie = Callable[[str, Placement], bool]
"""Says of a tensor of a program whether to consider a placement."""

IN_PIECES: tuple[AttentionBy, ...] = ("queries", "ring")
"""Those under which causal work depends on the pieces of a sequence that a rank has. (By heads it
has whole sequences, in however many pieces they came.)"""

_FROM_LAST: Mapping[AttentionBy, int] = {"queries": 2, "heads": 3, "ring": 2}
"""The dim that is cut of what attention makes, [..., heads, positions, width]; from the last. Over
a ring it is that of keys and values, too."""

_WORDS = {
    "queries": "attention by queries, keys and values gathered",
    "heads": "attention by heads, all-to-all",
    "ring": "attention over a ring, keys and values passed on",
}


def anyhow(name: str, placement: Placement) -> bool:
    """Consider every placement."""
    return True


def attends_by(program: Program, attention: AttentionBy | None) -> MayLie:
    """Tell placements of what attention makes that leave it running so; any where None."""
    if attention is None:
        return anyhow
    results = [op.outputs[0] for op in _attention(program)]
    dims = {name: len(program.tensor[name].shape) - _FROM_LAST[attention] for name in results}

    def attends(name: str, placement: Placement) -> bool:
        return name not in dims or (isinstance(placement, Shard) and placement.dim == dims[name])

    return attends


def attention_kinds(
    graph: ModelGraph, layouts: Iterable[ClassLayout]
) -> frozenset[AttentionBy | None]:
    """Return how layouts on one axis run attention of the graph's classes; None: otherwise."""
    found: set[AttentionBy | None] = set()
    for layout in layouts:
        program = graph.classes[layout.class_index]
        for op in _attention(program):
            sharding = layout.op_shardings.get(op.name)
            if sharding is None:
                found.add(None)
                continue
            made, key = (
                len(program.tensor[name].shape) - place.dim if isinstance(place, Shard) else None
                for name, place in (
                    (op.outputs[0], sharding.outputs[0]),
                    (op.inputs[1], sharding.inputs[1]),
                )
            )
            kinds = [kind for kind, dim in _FROM_LAST.items() if dim == made]
            is_ring = "ring" in kinds and key == made
            found.add(kinds[-1] if is_ring else kinds[0] if kinds else None)
    return frozenset(found)


def over_ring(layout: ClassLayout, program: Program, axis_size: int) -> ClassLayout:
    """Return a layout of a bound program whose attention by queries goes over a ring, all else as
    it is.

    Raises LayoutError where a ring does not serve, or where keys and values are gathered before
    something is made of them.
    """
    shardings = layout.op_shardings
    lies = dict(zip(program.inputs, map(parse_placement, layout.inputs), strict=True))
    ops = dict(layout.ops)
    for op in program.ops:
        sharding = shardings.get(op.name)
        if family_of(op.target).arithmetic == "attention":
            dim = len(program.tensor[op.outputs[0]].shape) - _FROM_LAST["ring"]
            place = None if sharding is None else sharding.inputs[0]
            keys = {lies.get(name) for name in op.inputs[1:3]}
            ring = None
            if sharding and isinstance(place, Shard) and place.dim == dim and keys == {place}:
                tables = sharding.inputs[3:]
                found = OpSharding(inputs=(place, place, place, *tables), outputs=sharding.outputs)
                counts = (place.segments,)
                served = strategies(
                    op,
                    program.tensor,
                    axis_size,
                    segments=counts,
                    mirrored=place.mirrored,
                    asked=True,
                )
                ring = found if found in served else None
            if ring is None:
                raise LayoutError(
                    f"attention {op.name} can't run over a ring: it drops weights, has a mask that "
                    "is a tensor or, in half precision, one of windows or tables, or its keys are "
                    "not cut by position; use attention by queries or by heads"
                )
            ops[op.name] = str(ring)
        if sharding is not None:
            lies |= dict(zip(op.outputs, sharding.outputs, strict=True))
    return layout.model_copy(update={"ops": tuple(ops.items())})


def pieces_of_sequences(layouts: Iterable[ClassLayout]) -> int:
    """Return the pieces of every sequence that a rank has between blocks."""
    return max((place.segments for place in _handed_on(layouts)), default=1)


def are_mirrored(layouts: Iterable[ClassLayout]) -> bool:
    """Whether every second of them is as far from the end as the one before from the start."""
    return any(place.mirrored for place in _handed_on(layouts))


def _handed_on(layouts: Iterable[ClassLayout]) -> Iterator[Shard]:
    handed = (parse_placement(place) for layout in layouts for place in layout.outputs)
    return (place for place in handed if isinstance(place, Shard))


def cut_in_words(graph: ModelGraph | None, layouts: Sequence[ClassLayout]) -> str:
    """Return how layouts on one axis cut sequences; without a graph not how attention runs."""
    pieces = pieces_of_sequences(layouts)
    words = f"{pieces} pieces of each on every rank" if pieces > 1 else "a piece of each on a rank"
    words += ", mirrored (zig-zag)" if are_mirrored(layouts) else ""
    kinds = frozenset() if graph is None else attention_kinds(graph, layouts)
    return "; ".join([words, *(text for kind, text in _WORDS.items() if kind in kinds)])


def uncut_sequences_messages(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """Return what to tell a user whose sequences tp does not divide: they lie whole between its
    products, on each of its ranks (no sequence parallelism).
    """
    degrees, length = plan.degrees, longest_sequence(graph)
    parts = degrees["tp"] * degrees["cp"]
    if degrees["tp"] == 1 or length < parts or length % parts == 0:
        return ()
    if not can_be_filled_up(graph, length):
        return ()
    more = length // parts * parts + parts
    return (
        f"{degrees} does not divide sequences of {length}, so between products each rank of tp has "
        f"all that the others have; of {more} it may have 1/{degrees['tp']}, and "
        "planner.apply(..., pad=) fills shorter ones up to that",
    )


def _attention(program: Program) -> list[Op]:
    return [op for op in program.ops if family_of(op.target).arithmetic == "attention"]
