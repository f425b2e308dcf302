"""Seconds of a loss whose logits are made a chunk of rows at a time.

    forward      of each chunk    product, cast, loss
    backward     of each chunk    product and cast again; backward of loss, cast and product, which
                                  reads the sum of the weight's gradient to add to it

Each as the plain op takes on so many rows (`chunk_of`). A profile may have ops of fewer rows that
are faster by more than they are smaller, as they run from caches; in all, chunks count as no faster
than the ops on all rows, so that what bounds these bounds chunks, too.
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
    forward_s, backward_s = chunk.num_chunks * sum(there), chunk.num_chunks * sum(back)
    if chunk.num_chunks > 1:
        at_once = chunk_of(op, tensor, all_rows=True)
        seconds = (plain_seconds(each, at_once.tensor) for each in at_once.ops)
        least_s, least_back_s = map(sum, zip(*seconds, strict=True))
        forward_s, backward_s = max(forward_s, least_s), max(backward_s, least_back_s)
    if not backward_s:
        return forward_s, 0.0
    backward_s += chunk.num_chunks * sum(there[:-1])
    weight = tensor[op.inputs[1]]
    if weight.requires_grad:
        query = OpQuery(
            target=FUSED_TARGET,
            shapes=((weight.numel_at(1),),),
            dtype=weight.dtype,
            direction="forward",
            flop=0.0,
            num_bytes=float(weight.bytes_at(1)),
        )
        backward_s += (chunk.num_chunks - 1) * profile.op_seconds(query).seconds
    return forward_s, backward_s
