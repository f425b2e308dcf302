"""What products with trained weights may do later, or beside a collective; free of torch.

The runtime defers the weight gradients of these products (`planner.runtime.stage.weight_grads`),
makes them while a collective is under way (`planner.runtime.stage.beside_collectives`), or
multiplies in pieces while their input or result is (`planner.runtime.stage.in_pieces`). The cost
model prices each, so all read these lists.

*In pieces*: where tp cuts sequences, a layer gathers them ahead of its first products, and sums and
scatters the result of its last. In a forward nothing else is left to do meanwhile, but for the
product itself: of k pieces of the rows, it multiplies one while the next is under way.

    whole       gather             | x1 x2 x3 x4 @ w    x1 x2 x3 x4 @ w | scatter
    in pieces   gather x1 |x2 |x3 |x4                   x1 @ w |x2 @ w |x3 @ w |x4 @ w
                          |x1 @ w |x2 @ w |x3 |x4              |scatter |...

(Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2023.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from planner.language.graph import Op, Program
from planner.language.layout.placement import Partial, Replicate, Shard, parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE, collectives
from planner.language.ops.call import ProductArgs
from planner.language.ops.families.products.narrow import scaling_of
from planner.language.ops.record import family_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class InPieces:
    """What of a program runs in pieces."""

    gathered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By redistribution that gathers: the products that take what it makes."""
    scattered: Mapping[str, str] = field(default_factory=dict)
    """By product: the redistribution that sums and scatters its result."""

    @property
    def products(self) -> tuple[str, ...]:
        """All products that run in pieces."""
        return (*(name for names in self.gathered.values() for name in names), *self.scattered)


def in_pieces(program: Program, pieces: int, made_again: Collection[str] = frozenset()) -> InPieces:
    """Return what of a bound program runs in so many pieces; nothing in one.

    These are products of trained weights that are there by then, cut along a dim that they do not
    sum over, of which each rank has a multiple of `pieces` rows. A factor with one scale for all of
    it would have another in each piece. Of a pair only one of which selective recomputation runs
    again (`made_again`), neither runs in pieces.
    """
    if pieces == 1:
        return InPieces()
    products = deferrable_products(program)
    place = {op.name: at for at, op in enumerate(program.ops)}
    made_at = {name: place[op.name] for op in program.ops for name in op.outputs}
    takers = defaultdict[str, list[Op]](list)
    for op in program.ops:
        for name in dict.fromkeys(op.inputs):
            takers[name].append(op)
    gathered: dict[str, tuple[str, ...]] = {}
    scattered: dict[str, str] = {}

    def runs_alike(op: Op, other: Op) -> bool:
        return (op.name in made_again) == (other.name in made_again)

    def may_be_cut(op: Op) -> bool:
        return op.name in products and scaling_of(op) != "tensorwise"

    for op in program.ops:
        if op.target != REDISTRIBUTE:
            continue
        src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
        (source,), (made,) = op.inputs, op.outputs
        if isinstance(src, Shard) and isinstance(dst, Replicate):
            if not _is_cut(program, source, src, pieces):
                continue
            found = [
                taker.name
                for taker in takers[made]
                if may_be_cut(taker)
                and products[taker.name][0].name == made
                and runs_alike(op, taker)
                and all(
                    made_at.get(ref.name, -1) < place[op.name]
                    for ref in products[taker.name][1:3]
                    if ref is not None
                )
            ]
            if found:
                gathered[op.name] = tuple(found)
        elif isinstance(src, Partial) and isinstance(dst, Shard) and source in made_at:
            maker = program.ops[made_at[source]]
            if (
                may_be_cut(maker)
                and runs_alike(op, maker)
                and source not in program.outputs
                and len(takers[source]) == 1
                and not any(maker.name in names for names in gathered.values())
                and _is_cut(program, made, dst, pieces)
            ):
                scattered[maker.name] = op.name
    return InPieces(gathered=gathered, scattered=scattered)


def _is_cut(program: Program, part: str, shard: Shard, pieces: int) -> bool:
    """Whether a rank's part of a plain dim, not the last, divides into so many pieces."""
    shape = program.tensor[part].shape_at(1)
    is_plain = shard.segments == 1 and not shard.mirrored
    return is_plain and shard.dim < len(shape) - 1 and shape[shard.dim] % pieces == 0
