"""Attention that is told of its mask, in the place of a tensor with a truth for each pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.capture.blocks import RawGraph, RawOp
from planner.capture.masks.follow import follow
from planner.capture.masks.values import (
    ANYWHERE,
    FREE,
    Additive,
    Bounds,
    Constant,
    Known,
    Pattern,
    narrower,
)
from planner.language.graph import Affine, Op, Ref, Size, TensorMeta
from planner.language.ops.families.products.masked_attention import MASKED
from planner.language.ops.record import packet_of

ATTENTION = "scaled_dot_product_attention"
RESHAPE = "aten.reshape.default"
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def with_told_masks(raw: RawGraph) -> RawGraph:
    """Return a graph whose attention is told of masks that are recognised."""
    ops = [item.op for item in raw.ops]
    if not any(packet_of(op.target) == ATTENTION for op in ops):
        return raw
    known, runs = follow(ops, raw.tensors)
    tensors = dict(raw.tensors)
    told: list[RawOp] = []
    for item in raw.ops:
        made = [item.op]
        if packet_of(item.op.target) == ATTENTION:
            made = _told(item.op, tensors, known, runs)
        told += [RawOp(op=op, module=item.module) for op in made]
    return replace(raw, tensors=tensors, ops=tuple(told))


def _told(
    op: Op,
    tensors: dict[str, TensorMeta],
    known: Mapping[str, Known],
    runs: Mapping[str, str],
) -> list[Op]:
    """Return attention without its mask, after what makes its tables, which are added to `tensors`;
    or the op as it is.
    """
    given = dict(zip(_POSITIONAL, op.args, strict=False)) | dict(op.kwargs)
    mask = given.get("attn_mask")
    if not isinstance(mask, Ref) or given.get("is_causal", False):
        return [op]
    found = mask_pattern(known.get(mask.name), tensors[mask.name].dtype)
    queries, keys = (tensors[name].shape[-2] for name in op.inputs[:2])
    told = None if found is None else simplified(found, runs, queries, keys)
    if told is None:
        return [op]
    more = tuple((name, value) for name, value in op.kwargs if name not in _POSITIONAL)
    dropout = given.get("dropout_p", 0.0)
    if told.is_full:
        args = (*op.args[:3], None, dropout) if dropout else op.args[:3]
        return [replace(op, args=args, kwargs=more)]
    # The kernels' own flag puts the first query beside the first key: right where both are as many.
    if replace(told, dims=ANYWHERE) == Pattern(ahead=(0, None)) and queries == keys:
        return [replace(op, args=(*op.args[:3], None, dropout, True), kwargs=more)]
    if dropout or not _is_usual(op, tensors):
        return [op]
    return _masked(op, told, tensors)


def _is_usual(op: Op, tensors: Mapping[str, TensorMeta]) -> bool:
    """Whether queries, keys and values are [batch, heads, positions, width] of one batch, and
    queries have as many positions as keys.
    """
    query, key, value = (tensors[name].shape for name in op.inputs[:3])
    if {len(query), len(key), len(value)} != {4} or query[2] != key[2]:
        return False
    heads = (query[1], key[1], value[1])
    if query[0] != key[0] or key[:3] != value[:3] or not all(isinstance(h, int) for h in heads):
        return False
    return key[1] == query[1] or bool(dict(op.kwargs).get("enable_gqa", False))


def _masked(op: Op, told: Pattern, tensors: dict[str, TensorMeta]) -> list[Op]:
    """Return the op that takes a pattern, after what gives its tables their shape."""
    if max(len(told.same), len(told.keys)) > 1:
        return [op]
    before: list[Op] = []
    tables: list[Ref | None] = []
    for kind, names in (("same", told.same), ("keys", told.keys)):
        for name in names:
            flat = _flattened(tensors[name], kind, op, tensors)
            if flat is None or (kind == "keys" and tensors[name].dtype != "bool"):
                return [op]
            before += [flat] if flat.outputs != (name,) else []
            tables.append(Ref(flat.outputs[0]))
        tables += [] if names else [None]
    named = dict(op.kwargs)
    numbers = (*told.ahead, told.chunk, named.get("scale"), bool(named.get("enable_gqa", False)))
    return [*before, replace(op, target=MASKED, args=(*op.args[:3], *numbers, *tables), kwargs=())]


def _flattened(table: TensorMeta, kind: str, op: Op, tensors: dict[str, TensorMeta]) -> Op | None:
    """Return an op that makes a table [batch, positions of keys]; one whose output is the table
    itself where it is that, and None where it has other sizes.
    """
    query, key = (tensors[name].shape for name in op.inputs[:2])
    shape = (query[0], key[2])
    if query[0] != Affine(1) or tuple(size for size in table.shape if size != 1) != shape:
        return None
    name = table.name if table.shape == shape else f"{op.outputs[0]}_{kind}"
    tensors.setdefault(name, replace(table, name=name, shape=shape, kind="activation", fqn=""))
    args = (Ref(table.name), shape)
    return Op(name=name, target=RESHAPE, args=args, outputs=(name,), line=op.line)


def mask_pattern(known: Known | None, dtype: str) -> Pattern | None:
    """Return the pattern that a mask of attention lets through, if it is known.

    Truth lets through; numbers are added to scores, those of a triangle of ones, too. What is added
    counts as a pattern only where each query is left a key: of one that is left none, low numbers
    that are all equal change nothing.
    """
    if known == Constant(value=1 if dtype == "bool" else 0):
        return Pattern()
    if isinstance(known, Additive) and dtype != "bool":
        return known.pattern if known.pattern.allows_itself else None
    return known if isinstance(known, Pattern) and dtype == "bool" else None


def simplified(
    pattern: Pattern, runs: Mapping[str, str], queries: Size, keys: Size
) -> Pattern | None:
    """Return a pattern for so many queries and keys without bounds that bound nothing; None where
    its dims are not those of scores, or a table's numbers say more than that places are of one run.
    """
    if isinstance(queries, Affine) or isinstance(keys, Affine):
        return None
    query, key, sample = pattern.dims
    if query not in (None, -2) or key not in (None, -1) or sample not in (None, -4):
        return None
    bounds = pattern.ahead
    numbered = {runs[name] for name in pattern.same if name in runs}
    for table, ahead in pattern.table_ahead:
        # Bounds of a table's numbers are bounds of places only inside runs where both go up by 1.
        if table not in numbered:
            return None
        # Inside a run the table's numbers go up as places do.
        bounds = narrower(bounds, ahead)
    chunk = pattern.chunk
    return replace(
        pattern,
        ahead=_clipped(bounds, queries, keys),
        chunk=None if chunk is None or chunk >= max(queries, keys) else chunk,
        table_ahead=(),
    )


def _clipped(bounds: Bounds, queries: int, keys: int) -> Bounds:
    low, high = bounds
    # Places differ by 1 - keys at the least and queries - 1 at the most: such bounds leave no pair
    # out.
    low = FREE[0] if low is not None and low <= 1 - keys else low
    high = FREE[1] if high is not None and high >= queries - 1 else high
    return low, high
