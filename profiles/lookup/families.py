"""Op families: ops whose time follows from the same few numbers.

A family names which measurements speak for an op that was not measured itself. Features are
base-2 logarithms of the numbers that matter, so a distance of 1 means "twice as large".
"""

from __future__ import annotations

from functools import lru_cache
from math import log2, prod

from planner.ops.flops import ATTENTION as _ATTENTION_PACKETS
from planner.ops.flops import CONVOLUTIONS, MATMULS
from profiles.records import OpQuery, PaceKind

MATMUL = "matmul"
CONVOLUTION = "convolution"
ATTENTION = "attention"
MEMORY = "memory"
BLOCK = "block"
BLOCK_TARGET = "planner.block"
"""Target of records of whole blocks, which check sums of ops and speak for no op."""

_POINTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "pow", "exp", "sqrt", "rsqrt", "clone", "to"),
        *("gelu", "silu", "relu", "tanh", "sigmoid", "dropout", "_to_copy", "copy"),
    )
)
_ROWWISE = frozenset(("layer_norm", "rms_norm", "native_layer_norm"))


def packet_of(target: str) -> str:
    """Return ``linear`` of ``aten.linear.default``; a name without dots is its own packet."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


@lru_cache(maxsize=4096)
def family_of(target: str) -> str:
    """Return the family of a target such as ``aten.linear.default``."""
    if target == BLOCK_TARGET:
        return BLOCK
    name = packet_of(target)
    if name in MATMULS or name == "_scaled_mm":  # of 8-bit floats
        return MATMUL
    if name in CONVOLUTIONS:
        return CONVOLUTION
    return ATTENTION if name in _ATTENTION_PACKETS else MEMORY


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
    name = packet_of(target)
    if name == "linear" or (name in _ROWWISE and shapes and len(shapes[0]) > 1):
        first = shapes[0]
        return ((prod(first[:-1]), first[-1]), *shapes[1:])
    if name in _POINTWISE and len(set(shapes)) == 1:
        return ((prod(shapes[0]),),) * len(shapes)
    return shapes


def matmul_sizes(shapes: tuple[tuple[int, ...], ...], target: str) -> tuple[int, int, int, int]:
    """Return (batch, M, N, K) of a matmul-like op from its input shapes.

    linear takes x (..., K) and weight (N, K); addmm and baddbmm take a bias first.
    """
    name = packet_of(target)
    operands = shapes[1:3] if name in ("addmm", "baddbmm") else shapes[:2]
    left, right = operands
    if name == "linear":
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
