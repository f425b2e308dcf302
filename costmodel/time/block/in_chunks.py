"""Seconds of a loss whose logits are made a chunk of rows at a time.

    forward      of each chunk    product, cast, loss
    backward     of each chunk    product and cast again; backward of loss, cast and product, which
                                  reads the sum of the weight's gradient to add to it

Each as the plain op takes on so many rows (`chunk_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from costmodel.table.fusion import FUSED_TARGET
from planner.language.graph import Op, TensorMeta
from planner.language.ops.families.losses.in_chunks import chunk_of
from profiles import OpQuery, Profile


def seconds_in_chunks(
    op: Op,
    tensor: Mapping[str, TensorMeta],
    profile: Profile,
    plain_seconds: Callable[[Op, Mapping[str, TensorMeta]], tuple[float, float]],
) -> tuple[float, float]:
    """Return device seconds (forward, backward) of such a loss of a bound program, of those that
    plain ops take.
    """
    chunk = chunk_of(op, tensor)
    there, back = zip(*(plain_seconds(each, chunk.tensor) for each in chunk.ops), strict=True)
    if not any(back):
        return chunk.num_chunks * sum(there), 0.0
    again = sum(there[:-1])
    weight = tensor[op.inputs[1]]
    read_s = 0.0
    if weight.requires_grad:
        query = OpQuery(
            target=FUSED_TARGET,
            shapes=((weight.numel_at(1),),),
            dtype=weight.dtype,
            direction="forward",
            flop=0.0,
            num_bytes=float(weight.bytes_at(1)),
        )
        read_s = profile.op_seconds(query).seconds
    # (The first chunk finds no sum, of the first microbatch.)
    return chunk.num_chunks * sum(there), chunk.num_chunks * (again + sum(back)) + (
        chunk.num_chunks - 1
    ) * read_s
