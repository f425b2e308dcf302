"""Matrix products: every dim of the product can be sharded; the contracted one sums."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.placement import OpSharding
from planner.ops.call import Call, Shape
from planner.ops.letters import Letters, broadcast, by_letters
from planner.ops.registry import rule


@rule("aten.linear")
def linear(call: Call) -> Iterator[OpSharding]:
    """Input […, i], weight [o, i], bias [o]: column (o), row (i) and data (…) splits."""
    batch = range(len(call.inputs[0]) - 1)
    x: Letters = [*batch, "i"]
    weight: Letters = ["o", "i"] if len(call.inputs[1]) == 2 else ["i"]
    out: Letters = [*batch, *weight[:-1]]
    yield from by_letters([x, weight, ["o"]][: len(call.inputs)], [out], summed="i", addends=(2,))


@rule("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot")
def matmul(call: Call) -> Iterator[OpSharding]:
    """Two factors with broadcast batch dims."""
    first, second, out = _product_letters(*call.inputs)
    yield from by_letters([first, second], [out], summed="k")


@rule("aten.addmm", "aten.baddbmm", "aten.addmv")
def addmm(call: Call) -> Iterator[OpSharding]:
    """The addend comes first and is broadcast to the product."""
    first, second, out = _product_letters(*call.inputs[1:])
    aligned = broadcast(call.inputs[0], call.outputs[0])
    addend = [None if i is None else out[i] for i in aligned]
    yield from by_letters([addend, first, second], [out], summed="k", addends=(0,))


@rule("aten.einsum")
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


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback", "planner.grouped_mm")
def grouped_mm(call: Call) -> Iterator[OpSharding]:
    """Rows [m, k] of several experts in a row, weights [e, k, n], end of each expert's rows [e]."""
    if len(call.inputs[0]) == 2 and len(call.inputs[1]) == 3:
        yield from by_letters([[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k")


def _product_letters(a: Shape, b: Shape) -> tuple[Letters, Letters, Letters]:
    """Letters of a, b and a @ b: numbers for batch dims, then m, k and n."""
    rows = ["m"] if len(a) > 1 else []
    columns = ["n"] if len(b) > 1 else []
    batch_a, batch_b = a[:-2], b[:-2]
    rank = max(len(batch_a), len(batch_b))
    padded = [(1,) * (rank - len(batch)) + batch for batch in (batch_a, batch_b)]
    whole = tuple(max(sizes) for sizes in zip(*padded, strict=True)) if rank else ()
    first = [*broadcast(batch_a, whole), *rows, "k"]
    second = [*broadcast(batch_b, whole), "k", *columns]
    return first, second, [*range(rank), *rows, *columns]
