"""Normalisation over the last dims: the dims in front can be sharded, the weights are whole."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.placement import OpSharding
from planner.ops.call import Call
from planner.ops.letters import by_letters
from planner.ops.registry import rule


@rule("aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten._fused_rms_norm")
def layer_norm(call: Call) -> Iterator[OpSharding]:
    """Tensor, normalized_shape, weight, bias; further outputs are the statistics."""
    shape = call.inputs[0]
    outer = len(shape) - len(call.op.args[1])  # type: ignore[arg-type]
    letters = [*range(outer), *[None] * (len(shape) - outer)]
    weights = [[None] * len(s) for s in call.inputs[1:]]
    outputs = [[*range(outer), *[None] * (len(s) - outer)] for s in call.outputs]
    yield from by_letters([letters, *weights], outputs)
