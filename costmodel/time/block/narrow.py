"""Seconds of a product in 8 bits as our runtime runs it: three products, with casts ahead of each.

    forward       casts of x and w, x w.T
    backward      casts of dy and w, dy w;  casts of dy and x, dy.T x

A cast moves, for each number (`planner.runtime.stage.calls.narrow`),

    op by op    2 to find the largest, 2 + 2 to multiply by the scale, 2 + 1 to cast
    compiled    2 to find the largest, 2 + 1 to multiply and cast

A product for a weight's gradient runs op by op in either case, as W jobs may have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from costmodel.execution.casts import CASTS
from costmodel.table.fusion import FUSED_TARGET
from planner.language.graph import Op, TensorMeta
from planner.language.ops.call import Call
from planner.language.ops.families.products.narrow import (
    NARROW_DTYPE,
    cast_elements,
    scaling_of,
    weight_is_narrow,
)
from planner.language.ops.record import family_of
from profiles import OpQuery, Profile
from profiles.lookup.families import matmul_sizes

CAST_BYTES = {"eager": 9, "fused": 5}
SCALED_BYTES = 8
"""Of each entry of a gradient that is multiplied by scales of its rows and columns: two passes."""

HALF = "bfloat16"
PRODUCT = "aten._scaled_mm.default"


def narrow_seconds(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, kernels: Literal["eager", "fused"]
) -> tuple[float, float]:
    """Return device seconds (forward, backward) of a product in 8 bits of a bound program."""
    first = family_of(op.target).first_factor
    x, weight = (tensor[name] for name in op.inputs[first : first + 2])
    shapes = tuple(tensor[name].shape_at(1) for name in op.inputs)
    _, rows, columns, inner = matmul_sizes(shapes, op.target)
    by_row = scaling_of(op) == "rowwise"
    casts, casts_back, casts_late = cast_elements(Call(op, tensor, 1))

    def product_s(m: int, n: int, k: int, dtype: str = NARROW_DTYPE) -> float:
        size = 1 if dtype == NARROW_DTYPE else 2
        query = OpQuery(
            target=PRODUCT if dtype == NARROW_DTYPE else "aten.mm.default",
            shapes=((m, k), (k, n)),
            dtype=dtype,
            direction="forward",
            flop=2.0 * m * n * k,
            num_bytes=float(size * (m * k + k * n) + 2 * m * n),
        )
        return profile.op_seconds(query).seconds

    def pass_s(num_bytes: float, entries: int) -> float:
        query = OpQuery(
            target=FUSED_TARGET,
            shapes=((entries,),),
            dtype=HALF,
            direction="forward",
            flop=0.0,
            num_bytes=num_bytes,
        )
        return profile.op_seconds(query).seconds if entries else 0.0

    def cast_s(entries: int, each: int) -> float:
        return pass_s(float(each * entries), entries)

    # Kernels with a scale a row are slower; only the forward's is such a kernel.
    forward_s = product_s(rows, columns, inner) / CASTS[scaling_of(op)].rate_part
    forward_s += cast_s(casts, CAST_BYTES[kernels])
    backward_s = 0.0
    if x.requires_grad:
        backward_s += product_s(rows, inner, columns) + cast_s(casts_back, CAST_BYTES[kernels])
        backward_s += cast_s(rows * inner * by_row, SCALED_BYTES)
    if weight.requires_grad:
        is_narrow = weight_is_narrow(rows)
        dtype = NARROW_DTYPE if is_narrow else HALF
        backward_s += product_s(columns, inner, rows, dtype)
        backward_s += cast_s(casts_late, CAST_BYTES["eager"])
        backward_s += cast_s(columns * inner * by_row * is_narrow, SCALED_BYTES)
    return forward_s, backward_s
