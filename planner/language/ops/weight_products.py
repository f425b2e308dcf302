"""Which products of a program make weight gradients that can be deferred; free of torch.

The runtime defers the weight gradients of these products (`planner.runtime.stage.weight_grads`),
or makes them while a collective is under way (`planner.runtime.stage.beside_collectives`), and the
cost model prices both, so all read these lists.
"""

from __future__ import annotations

from planner.language.graph import Program
from planner.language.layout.placement import parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE, collectives
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
        # (One that is spread over outputs, or has a dim more, has its gradient from autograd.)
        bias_is_ours = bias is None or (
            bias.name in from_params
            and program.tensor[bias.name].shape == program.tensor[op.outputs[0]].shape[-1:]
        )
        if is_trained and two_dims and bias_is_ours and x.name not in from_params:
            found[op.name] = product
    return found


def products_beside(program: Program) -> dict[str, tuple[str, ...]]:
    """Return which weight gradients can be made while a collective of the backward is under way: by
    the redistribution that it is of, the products, as the backward reaches them.

    Of a product with a trained parameter the backward makes an input gradient, which the ops before
    wait for, and a weight gradient, which nothing waits for. So the latter waits, together with
    what it is made of, for the next redistribution of the program with a collective in its
    backward, of whichever axis. Behind the last of these products make both at once.

    A redistribution is one of these if what it makes reaches the input of such a product: the
    gradient of that input then comes to it. No gradient need come to another, whose result is only
    compared, say, and what waited for it would be made when ZeRO has reduced the block's gradients.
    """
    products, tensor = deferrable_products(program), program.tensor
    ends: set[str] = set()
    waits = set[str]()
    # By tensor: of the redistributions that its gradient comes to, the one that it comes to first.
    behind: dict[str, tuple[int, str]] = {}
    for at, op in enumerate(program.ops):
        reached = [behind[name] for name in op.inputs if name in behind]
        if op.name in products:
            x, weight, _, _ = products[op.name]
            if weight.name in program.params and x.name in behind:
                waits.add(op.name)
                ends.add(behind[x.name][1])
        if op.target == REDISTRIBUTE and tensor[op.inputs[0]].requires_grad:
            src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
            if collectives(src, dst, bool(op.args[4]))[1] is not None:
                reached.append((at, op.name))
        if reached:
            last = max(reached)
            behind |= {name: last for name in op.outputs if tensor[name].requires_grad}
    found: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    # The engine runs the last op's backward first.
    for op in reversed(program.ops):
        if op.name in waits:
            waiting.append(op.name)
        elif op.name in ends:
            found[op.name] = tuple(waiting)
            waiting = []
    return found
