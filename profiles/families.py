"""Op families: ops whose time follows from the same few numbers.

A family names which measurements speak for an op that was not measured itself. Features are
base-2 logarithms of the numbers that matter, so a distance of 1 means "twice as large".
"""

from __future__ import annotations

from math import log2, prod

from profiles.records import OpQuery

MATMUL = "matmul"
ATTENTION = "attention"
MEMORY = "memory"

_MATMUL_NAMES = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "convolution", "einsum"}


def family_of(target: str) -> str:
    """Return the family of a target such as ``aten.linear.default``."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else target
    if name in _MATMUL_NAMES:
        return MATMUL
    return ATTENTION if "attention" in name else MEMORY


def matmul_sizes(shapes: tuple[tuple[int, ...], ...], target: str) -> tuple[int, int, int, int]:
    """Return (batch, M, N, K) of a matmul-like op from its input shapes.

    linear takes x (..., K) and weight (N, K); addmm and baddbmm take a bias first.
    """
    name = target.split(".")[1] if "." in target else target
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
