"""Products beside the collectives of their input or result, in pieces of rows: what shows then.

A gather in k pieces of g seconds each, whose products take p seconds a piece, shows its first piece
and what of the others is not hidden by the products of the pieces before them; a scatter its last
piece, and likewise (`planner.language.ops.weight_products`):

    shows   g + s,  s = what k - 1 pieces show beside k - 1 products (`beside_seconds`):
            max(0, (k - 1) (g - p)) where neither slows the other
    work    k p + copies

Products of fewer rows reach less of a device's rate, each piece has launches and a message of its
own, and what it makes is copied to where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from costmodel.time.block.beside import shown_seconds
from costmodel.time.block.compute import op_seconds, redistribute_seconds
from costmodel.topology import Axis
from planner.language.graph import Program, TensorMeta
from planner.language.layout.placement import Shard, parse_placement
from planner.language.ops.weight_products import InPieces, deferrable_products
from profiles import OpQuery, Profile

_COPY = "aten.clone.default"


@dataclass(frozen=True, slots=True)
class Shown:
    """Seconds in a forward of what runs in pieces."""

    moved: Mapping[str, float] = field(default_factory=dict)
    """By redistribution: what of its collectives shows."""
    whole: Mapping[str, float] = field(default_factory=dict)
    """By redistribution: all its pieces, nothing hidden."""
    products: Mapping[str, float] = field(default_factory=dict)
    """By product: all its pieces, with copies."""


def seconds_in_pieces(
    local: Program, profile: Profile, axes: Mapping[str, Axis], cut: InPieces, pieces: int
) -> Shown:
    """Return the seconds of what of a bound local program runs in so many pieces, on `axes`."""
    if not cut.products:
        return Shown()
    op_of = {op.name: op for op in local.ops}
    taken = deferrable_products(local)
    moved: dict[str, float] = {}
    whole: dict[str, float] = {}
    products: dict[str, float] = {}
    # What is cut, beside the products' own input: a gather's results are put together, a scatter's
    # rows are brought together ahead of each product.
    pairs = [
        (op_of[name], 2, [(op_of[taker], op_of[taker].outputs[0]) for taker in takers])
        for name, takers in cut.gathered.items()
    ]
    pairs += [
        (op_of[name], 3, [(op_of[maker], taken[maker][0].name)])
        for maker, name in cut.scattered.items()
    ]
    for moving, at, around in pairs:
        shard = parse_placement(str(moving.args[at]))
        assert isinstance(shard, Shard)
        rows = {*moving.inputs, *moving.outputs}
        for op, _ in around:
            rows |= {taken[op.name][0].name, op.outputs[0]}
        part = {**local.tensor} | {
            name: _piece(local.tensor[name], shard.dim, pieces) for name in rows
        }
        piece_s, _ = redistribute_seconds(moving, part, profile, axes)
        each_s = [op_seconds(op, part, profile)[0] for op, _ in around]
        whole[moving.name] = pieces * piece_s
        moved[moving.name] = piece_s + shown_seconds(
            profile, (pieces - 1) * piece_s, (pieces - 1) * sum(each_s)
        )
        for (op, copied), seconds in zip(around, each_s, strict=True):
            products[op.name] = pieces * seconds + _copy_seconds(local.tensor[copied], profile)
    return Shown(moved=moved, whole=whole, products=products)


def _piece(meta: TensorMeta, dim: int, pieces: int) -> TensorMeta:
    shape = meta.shape_at(1)
    return replace(meta, shape=tuple(s // pieces if d == dim else s for d, s in enumerate(shape)))


def _copy_seconds(meta: TensorMeta, profile: Profile) -> float:
    query = OpQuery(
        target=_COPY,
        shapes=(meta.shape_at(1),),
        dtype=meta.dtype,
        direction="forward",
        flop=0.0,
        num_bytes=2.0 * meta.bytes_at(1),
    )
    return profile.op_seconds(query).seconds
