"""Matrix products: every dim of the product can be sharded; the contracted one sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

from planner.language.graph import Op, Ref
from planner.language.layout.placement import OpSharding, Own, Replicate, Shard
from planner.language.ops.call import Call, ProductArgs, Shape
from planner.language.ops.families.products.runs_of_rows import (
    ROWS_BY_VALUES,
    ends_of_runs,
    of_runs,
)
from planner.language.ops.flops import output_numel, product_backward
from planner.language.ops.kernel import (
    LARGE_BYTES,
    KernelCall,
    Saved,
    saved_factors,
    saves_differentiable_inputs,
)
from planner.language.ops.letters import Letters, broadcast, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import BY_RULES, Across
from planner.language.ops.strides import has_rows, reshaped_strides


def linear(call: Call) -> Iterator[OpSharding]:
    """Input […, i], weight [o, i], bias [o]: column (o), row (i) and data (…) splits."""
    batch = range(len(call.inputs[0]) - 1)
    x: Letters = [*batch, "i"]
    weight: Letters = ["o", "i"] if len(call.inputs[1]) == 2 else ["i"]
    out: Letters = [*batch, *weight[:-1]]
    yield from by_letters([x, weight, ["o"]][: len(call.inputs)], [out], summed="i", addends=(2,))


def matmul(call: Call) -> Iterator[OpSharding]:
    """Two factors with broadcast batch dims."""
    first, second, out = _product_letters(*call.inputs)
    yield from by_letters([first, second], [out], summed="k")


def addmm(call: Call) -> Iterator[OpSharding]:
    """The addend comes first and is broadcast to the product."""
    first, second, out = _product_letters(*call.inputs[1:])
    aligned = broadcast(call.inputs[0], call.outputs[0])
    addend = [None if i is None else out[i] for i in aligned]
    yield from by_letters([addend, first, second], [out], summed="k", addends=(0,))


def einsum(call: Call) -> Iterator[OpSharding]:
    """Any einsum with plain letters (no ellipsis, no diagonal)."""
    equation = str(call.op.args[0]).replace(" ", "")
    if "." in equation:
        return
    left, arrow, out = equation.partition("->")
    inputs = left.split(",")
    joined = "".join(inputs)
    if not arrow:  # implicit output: letters that appear once, in alphabetical order
        out = "".join(sorted(letter for letter in set(joined) if joined.count(letter) == 1))
    # A letter that one operand has with size one is broadcast; leave it whole.
    stretched = {
        letter
        for letter in joined
        if len(
            {
                s[i]
                for t, s in zip(inputs, call.inputs, strict=True)
                for i, c in enumerate(t)
                if c == letter
            }
        )
        > 1
    }
    letters = [[None if c in stretched else c for c in term] for term in (*inputs, out)]
    yield from by_letters(letters[:-1], letters[-1:], summed=set(joined) - set(out))


def _einsum_with_ellipsis(call: Call) -> Iterator[OpSharding]:
    """The dims of an ellipsis, aligned from the last; plain equations have a sharding rule."""
    left, _, out = str(call.op.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." not in left or "..." not in out:
        return
    extra = max(len(s) - len(t.replace("...", "")) for t, s in zip(terms, call.inputs, strict=True))

    def spelled(term: str, rank: int) -> list[int | str | None]:
        before, dots, after = term.partition("...")
        count = rank - len(before) - len(after) if dots else 0
        return [*before, *range(extra - count, extra), *after]

    letters = [spelled(t, len(s)) for t, s in zip(terms, call.inputs, strict=True)]
    result = spelled(out, len(call.outputs[0]))
    summed = {c for term in letters for c in term if c is not None} - set(result)
    yield from by_letters(letters, [result], summed=summed)


def grouped_mm(call: Call) -> Iterator[OpSharding]:
    """Rows [m, k] of several experts in a row, weights [e, k, n], end of each expert's rows [e].

    Rows are cut where each rank has runs of its own (`families.entries.routing`).
    """
    if len(call.inputs) == 3 and len(call.inputs[0]) == 2 and len(call.inputs[1]) == 3:
        yield OpSharding(inputs=(Shard(0), Replicate(), Own()), outputs=(Shard(0),))
        yield from by_letters([[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k")


def _product_letters(a: Shape, b: Shape) -> tuple[Letters, Letters, Letters]:
    """Letters of a, b and a @ b: numbers for batch dims, then m, k and n."""
    rows = ["m"] if len(a) > 1 else []
    columns = ["n"] if len(b) > 1 else []
    batch_a, batch_b = a[:-2], b[:-2]
    rank = max(len(batch_a), len(batch_b))
    padded = [(1,) * (rank - len(batch)) + batch for batch in (batch_a, batch_b)]
    # Batch dims broadcast: a dim of 1 is stretched to the other factor's.
    whole = tuple(max(sizes) for sizes in zip(*padded, strict=True)) if rank else ()
    first = [*broadcast(batch_a, whole), *rows, "k"]
    second = [*broadcast(batch_b, whole), "k", *columns]
    return first, second, [*range(rank), *rows, *columns]


# --------------------------------------------------------------------------------- flop, memory


def _contracted_flop(weight: int, dim: int = -1) -> Callable[[Call], float]:
    """Return the rule of products: 2 flop for each entry made and each step of the contraction.

    `weight` is the input whose `dim` is contracted.
    """

    def rule(call: Call) -> float:
        return 2.0 * output_numel(call) * call.inputs[weight][dim]

    return rule


def _einsum_flop(call: Call) -> float:
    equation = str(call.op.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation, call.inputs, strict=False):
        sizes.update(zip(letters, shape, strict=False))
    return 2.0 * prod(sizes.values())


def _factors(call: KernelCall) -> Saved:
    """Both factors, each where its partner needs a gradient."""
    return Saved(tensors=saved_factors(call, *call.op.inputs[:2]))


def _factors_after_addend(call: KernelCall) -> Saved:
    return Saved(tensors=saved_factors(call, *call.op.inputs[1:3]))


def _rows(call: KernelCall) -> Saved:
    """A linear layer multiplies rows: an input whose dims can't be folded into rows in place is
    copied, and the copy is saved. Products with a large weight save the input as it was given
    (`planner.runtime.stage.weight_grads`).
    """
    x, weight = call.op.inputs[:2]
    saved = _factors(call)
    as_given = call.num_bytes(weight) >= LARGE_BYTES
    if x not in saved.tensors or as_given or has_rows(call.shape(x), call.strides[x]):
        return saved
    others = tuple(name for name in saved.tensors if name != x)
    return Saved(tensors=others, extra_bytes=call.num_bytes(x))


def _folded_factors(call: KernelCall) -> Saved:
    """Batched matmul folds its batch dims; a factor that can't be folded in place is copied."""
    left, right = call.op.inputs[:2]
    if len(call.shape(right)) <= 2 or len(call.shape(left)) <= 2:
        return _factors(call)
    batch = call.shape(call.op.outputs[0])[:-2]
    tensors, extra = [], 0
    for name, partner in ((left, right), (right, left)):
        if not call.needs_grad(partner):
            continue
        shape = call.shape(name)
        expanded = shape[:-2] != batch
        folded = (prod(shape[:-2]), *shape[-2:])
        # matmul stretches the factor over the whole batch first, by a copy.
        if expanded:
            extra += prod(batch) * prod(shape[-2:]) * call.element_bytes(name)
        elif reshaped_strides(shape, call.strides[name], folded) is None:
            extra += call.num_bytes(name)
        else:
            tensors.append(name)
    return Saved(tensors=tuple(tensors), extra_bytes=extra)


# ------------------------------------------------- products whose weight gradient may be deferred


def _linear_product(op: Op) -> ProductArgs | None:
    match op.args:
        case (Ref() as x, Ref() as weight) if not op.kwargs:
            return x, weight, None, True
        case (Ref() as x, Ref() as weight, Ref() | None as bias) if not op.kwargs:
            return x, weight, bias, True
    return None


def _addmm_product(op: Op) -> ProductArgs | None:
    match op.args:
        case (Ref() as bias, Ref() as x, Ref() as weight) if not op.kwargs:
            return x, weight, bias, False
    return None


def _plain_product(op: Op) -> ProductArgs | None:
    match op.args:
        case (Ref() as x, Ref() as weight) if not op.kwargs:
            return x, weight, None, False
    return None


# ---------------------------------------------------------------------------------------- records

PRODUCT = OpFamily(
    name="product",
    shard=(ShardRule(matmul),),
    worth_moving=True,
    arithmetic="matmul",
    flop=_contracted_flop(0),
    backward=product_backward,
    saved=_factors,
    weight_product=_plain_product,
    recomputed=False,
    across=Across(algebra="product"),
)
"""Two factors. The families below differ from it in their layout of arguments."""

register(replace(PRODUCT, name="product of matrices", targets=aten("mm bmm mv dot")))
register(
    replace(
        PRODUCT, name="product with folded batch", targets=aten("matmul"), saved=_folded_factors
    )
)
LINEAR = register(
    replace(
        PRODUCT,
        name="linear layer",
        targets=aten("linear"),
        shard=(ShardRule(linear),),
        flop=_contracted_flop(1),
        saved=_rows,
        rows_alone=True,
        weight_product=_linear_product,
        across=BY_RULES,
    )
)
ADDMM = register(
    replace(
        PRODUCT,
        name="product and addend",
        targets=aten("addmm baddbmm addmv"),
        shard=(ShardRule(addmm),),
        flop=_contracted_flop(1),
        saved=_factors_after_addend,
        first_factor=1,
        weight_product=_addmm_product,
        across=BY_RULES,
    )
)
register(
    replace(
        PRODUCT,
        name="einsum",
        targets=aten("einsum"),
        shard=(ShardRule(einsum),),
        flop=_einsum_flop,
        saved=saves_differentiable_inputs,
        weight_product=None,
        across=Across(rule=_einsum_with_ellipsis, algebra="product"),
    )
)
register(
    OpFamily(
        name="product of 8-bit floats",
        targets=aten("_scaled_mm"),
        arithmetic="matmul",
        recomputed=False,
    )
)
GROUPED_MM = "planner.grouped_mm"
PRODUCT_OF_RUNS = "planner.product_of_runs"

PRODUCTS_OF_RUNS = register(
    OpFamily(
        name="products of runs of rows",
        targets=("aten._grouped_mm", "transformers.grouped_mm_fallback", GROUPED_MM),
        shard=(ShardRule(grouped_mm),),
        arithmetic="matmul",
        flop=_contracted_flop(0),
        backward=product_backward,
        across=Across(handlers=(of_runs,)),
        deals_rows=True,
        numbers=ends_of_runs,
        recomputed=False,
    )
)
register(
    replace(
        PRODUCTS_OF_RUNS,
        name="products of runs of rows, expert by expert",
        targets=(PRODUCT_OF_RUNS,),
        eager=ROWS_BY_VALUES,
    )
)
