"""Op families: ops whose time follows from the same few numbers.

A family names the measurements from which the time of an unmeasured op is read. Features are
base-2 logarithms of the numbers that matter, so a distance of 1 means "twice as large".
"""

from __future__ import annotations

from math import ceil, log2, prod

from planner.language.ops import record
from planner.language.ops.record import packet_of
from profiles.records import OpQuery, PaceKind

MATMUL = "matmul"
CONVOLUTION = "convolution"
ATTENTION = "attention"
MEMORY = "memory"
BLOCK = "block"
BLOCK_TARGET = "planner.block"
"""Target of records of whole blocks, which check sums of ops; no op is timed by them."""


def family_of(target: str) -> str:
    """Return the family of a target such as ``aten.linear.default``."""
    if target == BLOCK_TARGET:
        return BLOCK
    return record.family_of(target).arithmetic


def pace_kind(target: str) -> PaceKind:
    """Return which of the fixed works of `clock.Pace` an op keeps step with."""
    arithmetic = (MATMUL, CONVOLUTION, ATTENTION, BLOCK)
    return "product" if family_of(target) in arithmetic else "light"


def canonical_shapes(
    target: str, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Return shapes in the form in which equal ones take equal time.

    A linear layer and a row-wise norm see only how many rows there are; a pointwise op on
    equal shapes only how many elements.
    """
    facts = record.family_of(target)
    if facts.rows_alone and shapes and len(shapes[0]) > 1:
        first = shapes[0]
        return ((prod(first[:-1]), first[-1]), *shapes[1:])
    if facts.elements_alone and len(set(shapes)) == 1:
        return ((prod(shapes[0]),),) * len(shapes)
    return shapes


def matmul_sizes(shapes: tuple[tuple[int, ...], ...], target: str) -> tuple[int, int, int, int]:
    """Return (batch, M, N, K) of a matmul-like op from its input shapes.

    linear takes x (..., K) and weight (N, K); addmm and baddbmm take a bias first; runs of rows
    (M * batch, K) have a matrix of (batch, K, N) each.
    """
    family = record.family_of(target)
    left, right = shapes[family.first_factor : family.first_factor + 2]
    if family.deals_rows and len(right) == 3:  # runs of as many rows as on average
        return right[0], ceil(left[0] / max(1, right[0])), right[2], right[1]
    if packet_of(target) == "linear":  # its weight is transposed
        return 1, prod(left[:-1]), right[0], left[-1]
    m = left[-2] if len(left) > 1 else 1
    n = right[-1] if len(right) > 1 else 1
    return prod(left[:-2]), m, n, left[-1]


def features(query: OpQuery) -> tuple[float, ...]:
    """Return the coordinates in which the op's time is interpolated.

    matmul: batch, M, N, K; attention: batch*heads, query length, key length, head size;
    others: bytes. All as log2 of (1 + size).
    """
    family = family_of(query.target)
    sizes: tuple[float, ...]
    if family == MATMUL and len(query.shapes) >= 2 and all(query.shapes[:2]):
        sizes = matmul_sizes(query.shapes, query.target)
    elif family == ATTENTION and len(query.shapes) >= 3 and len(query.shapes[0]) >= 3:
        q, k = query.shapes[0], query.shapes[1]
        sizes = (prod(q[:-2]), q[-2], k[-2], q[-1])
    else:
        sizes = (query.num_bytes,)
    return tuple(log2(1 + size) for size in sizes)
