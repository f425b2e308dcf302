"""Attention that is told of its mask, in the place of a tensor with a truth for each pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from planner.graph import Affine, Op, Ref, Size, TensorMeta
from planner.graph.blocks import RawGraph
from planner.ops.record import packet_of

ATTENTION = "scaled_dot_product_attention"
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def with_told_masks(raw: RawGraph) -> RawGraph:
    """Return a graph whose attention has no mask that is causal, or true everywhere."""
    ops = [item.op for item in raw.ops]
    if not any(packet_of(op.target) == ATTENTION for op in ops):
        return raw
    known, runs = follow(ops, raw.tensors)
    return replace(
        raw,
        ops=tuple(replace(item, op=_told(item.op, raw.tensors, known, runs)) for item in raw.ops),
    )


def _told(
    op: Op,
    tensors: Mapping[str, TensorMeta],
    known: Mapping[str, Known],
    runs: Mapping[str, str],
) -> Op:
    """Return attention without its mask, or the op as it is."""
    if packet_of(op.target) != ATTENTION:
        return op
    given = dict(zip(_POSITIONAL, op.args, strict=False)) | dict(op.kwargs)
    mask = given.get("attn_mask")
    if not isinstance(mask, Ref) or given.get("is_causal", False):
        return op
    found = mask_pattern(known.get(mask.name), tensors[mask.name].dtype)
    queries, keys = (tensors[name].shape[-2] for name in op.inputs[:2])
    told = None if found is None else simplified(found, runs, queries, keys)
    if told is None:
        return op
    more = tuple((name, value) for name, value in op.kwargs if name not in _POSITIONAL)
    dropout = given.get("dropout_p", 0.0)
    if told.is_full:
        args = (*op.args[:3], None, dropout) if dropout else op.args[:3]
        return replace(op, args=args, kwargs=more)
    if replace(told, dims=ANYWHERE) == Pattern(ahead=(0, None)) and queries == keys:
        return replace(op, args=(*op.args[:3], None, dropout, True), kwargs=more)
    return op


def mask_pattern(known: Known | None, dtype: str) -> Pattern | None:
    """Return the pattern that a mask of attention lets through, if it is known.

    What is added to scores counts as one only where each query is left a key: of one that is left
    none, low numbers that are all equal change nothing.
    """
    if known == Constant(value=1 if dtype == "bool" else 0):
        return Pattern()
    if isinstance(known, Additive):
        return known.pattern if known.pattern.allows_itself else None
    return known if isinstance(known, Pattern) else None


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
    low = FREE[0] if low is not None and low <= 1 - keys else low
    high = FREE[1] if high is not None and high >= queries - 1 else high
    return low, high
