"""Gradients that a plan sums in 16 bits, because the model's own parameters have no more."""

from __future__ import annotations

from planner.language.graph import ModelGraph
from planner.language.plan.plan import Plan

_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of a number."""

_WITH_MASTERS = {"bfloat16": "bf16", "float16": "fp16"}
"""The precision that keeps the dtype beside sums and weights in fp32."""

_FEW = 16
"""Up to fewer terms, a sum's error is about that of the gradients themselves: 0.4% in bfloat16, of
which 16 microbatches make 0.7% and 128 make 1.4%. From 2**bits equal terms on a sum stands still.
"""


class ShortSumsWarning(UserWarning):
    """A plan sums the gradients of many microbatches in 16 bits."""


def short_sums_messages(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """Return what to tell a user whose model was cast, where a plan has many microbatches.

    One process would have the gradient of the whole batch at once, whose products sum in fp32.
    With precision "bf16" or "fp16" sums are fp32.
    """
    terms = plan.num_microbatches
    if plan.precision != "model" or terms < _FEW:
        return ()
    trained = [meta for meta in graph.params if meta.requires_grad]
    short = [meta for meta in trained if meta.dtype in _BITS]
    if not short:
        return ()
    dtype = short[0].dtype
    return (
        f"{len(short)} of {len(trained)} trained parameters are {dtype}, and so are the sums of "
        f"their gradients over {terms} microbatches, which round to {_BITS[dtype]} bits at each; "
        f"search with `precision` {_WITH_MASTERS[dtype]} for sums and weights in fp32, or with a "
        "larger `microbatch_size`",
    )
