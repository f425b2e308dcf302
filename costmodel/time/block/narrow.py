"""Seconds of a product in 8 bits as our runtime runs it: three products, with casts ahead of each.

    forward       casts of x and w, x w.T
    backward      casts of dy and w, dy w;  casts of dy and x, dy.T x

What casts move stands with that of other runtimes (`costmodel.execution.casts`). A linear layer's
product for its weight's gradient runs op by op in either case, as W jobs may have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from costmodel.execution.casts import CASTS, OWN_CASTS, SCALED_BYTES
from costmodel.table.fusion import FUSED_TARGET
from planner.language.graph import Op, TensorMeta
from planner.language.ops.call import Call
from planner.language.ops.families.products.narrow import (
    cast_elements,
    rate_dtype,
    scaling_of,
    weight_is_narrow,
)
from planner.language.ops.record import family_of
from profiles import OpQuery, Profile
from profiles.lookup.families import matmul_sizes

HALF = "bfloat16"
PRODUCT, PRODUCTS_OF_RUNS = "aten._scaled_mm.default", "aten._grouped_mm.default"


def narrow_seconds(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, kernels: Literal["eager", "fused"]
) -> tuple[float, float]:
    """Return device seconds (forward, backward) of a product in 8 bits of a bound program."""
    family = family_of(op.target)
    x, weight = (tensor[name] for name in op.inputs[family.first_factor :][:2])
    shapes = tuple(tensor[name].shape_at(1) for name in op.inputs)
    runs, rows, columns, inner = matmul_sizes(shapes, op.target)
    of_runs = family.deals_rows
    casts, casts_back, casts_late = cast_elements(Call(op, tensor, 1))
    own = OWN_CASTS[kernels]
    scaling = scaling_of(op)
    narrow = rate_dtype(scaling)

    def product_s(m: int, n: int, k: int, dtype: str = narrow) -> float:
        """Of (m, k) and (k, n), of each run."""
        size = 1 if dtype == narrow else 2
        one = PRODUCT if dtype == narrow else "aten.mm.default"
        query = OpQuery(
            target=PRODUCTS_OF_RUNS if of_runs else one,
            shapes=((runs * m, k), (runs, k, n), (runs,)) if of_runs else ((m, k), (k, n)),
            dtype=dtype,
            direction="forward",
            flop=2.0 * runs * m * n * k,
            num_bytes=float(runs * (size * (m * k + k * n) + 2 * m * n)),
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
        return profile.op_seconds(query).seconds if num_bytes else 0.0

    def cast_s(entries: int, each: int) -> float:
        return pass_s(float(each * entries), entries)

    # Kernels with a scale a row are slower; of linear layers only the forward's is such a kernel,
    # and gradients are multiplied by their scales.
    rate_part = CASTS[scaling].rate_part
    rate_part_back = rate_part if of_runs else 1.0
    scaled_bytes = SCALED_BYTES * (scaling == "rowwise" and not of_runs)
    forward_s = product_s(rows, columns, inner) / rate_part + cast_s(casts, own.bytes)
    backward_s = 0.0
    if x.requires_grad:
        backward_s += product_s(rows, inner, columns) / rate_part_back
        backward_s += cast_s(casts_back, own.bytes) + cast_s(rows * inner, scaled_bytes)
    if weight.requires_grad and of_runs:
        backward_s += product_s(inner, columns, rows) / rate_part_back
        backward_s += cast_s(casts_late, own.runs_bytes)
    elif weight.requires_grad:
        dtype = narrow if weight_is_narrow(rows, scaling) else HALF
        backward_s += product_s(columns, inner, rows, dtype)
        backward_s += cast_s(casts_late, OWN_CASTS["eager"].bytes)
        backward_s += cast_s(columns * inner, scaled_bytes * (dtype == narrow))
    return forward_s, backward_s
