"""Which products of a program make weight gradients that can be deferred; free of torch.

The runtime defers the weight gradients of these products (`planner.runtime.stage.weight_grads`)
and the cost model prices what is deferred, so both read this list.
"""

from __future__ import annotations

from planner.language.graph import Program
from planner.language.ops.call import ProductArgs
from planner.language.ops.record import family_of

LARGE_BYTES = 2**20
"""From this size on, a weight's gradient is added to the sum inside its product, unless ZeRO
takes gradients elsewhere (`planner.runtime.stage.weight_grads`)."""


def deferrable_products(program: Program) -> dict[str, ProductArgs]:
    """Return (x, weight, bias, transposed) of each op that multiplies by a trained weight.

    A weight is a parameter or made from parameters only (a transpose, a cast). A product
    whose x never needs a gradient counts too: its weight gradient is as much work.
    """
    from_params = {name for name in program.params if program.tensor[name].kind == "param"}
    found = {}
    for op in program.ops:
        if op.inputs and from_params.issuperset(op.inputs):
            from_params.update(op.outputs)
            continue
        weight_product = family_of(op.target).weight_product
        product = weight_product(op) if weight_product is not None else None
        if product is None:
            continue
        x, weight, bias, _ = product
        is_trained = weight.name in from_params and program.tensor[weight.name].requires_grad
        two_dims = len(program.tensor[weight.name].shape) == 2
        bias_is_ours = bias is None or bias.name in from_params
        if is_trained and two_dims and bias_is_ours and x.name not in from_params:
            found[op.name] = product
    return found
