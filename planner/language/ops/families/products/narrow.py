"""Products whose factors are cast to 8-bit floats: layers of a plan of precision fp8.

An op is the captured one with another target, ``planner.linear.rowwise`` of ``aten.linear.default``
(`planner.capture.narrow` says of which): the same arguments, parameters and results. The runtime
casts both factors ahead of each of its three products (`planner.runtime.stage.calls.narrow`), and
saves what the op in 16 bits saves.

Products of runs of rows (matrices of experts) have a scale for each row of a factor alone: kernels
take no other. A row is of one run: of the rows themselves, of a run's columns where its rows are
what is summed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from planner.language.graph import Op, Ref
from planner.language.layout.placement import OpSharding
from planner.language.ops.call import Call, Rule, local_shape
from planner.language.ops.families.products.matmul import (
    ADDMM,
    GROUPED_MM,
    LINEAR,
    PRODUCTS_OF_RUNS,
    grouped_mm,
)
from planner.language.ops.kernel import KernelCall, Saved, saved_factors
from planner.language.ops.record import OpFamily, ShardRule, family_of, register

TILE, BLOCK = 16, 32
TILES = {"rowwise": TILE, "tensorwise": TILE, "blocks": BLOCK}
"""By what has a scale (a row of a factor, all of it, or so many neighbours in a row): inner dims
and columns of products of 8-bit floats are multiples of it (torch._scaled_mm; of blocks: Open
Compute Project, Microscaling Formats 1.0, 5.2)."""

NARROW_DTYPE, BLOCKS_DTYPE = "float8_e4m3fn", "mxfp8"
"""Under which devices have a rate of products of 8-bit floats, and of such with a scale a block."""

CAPABILITY = {
    "rowwise": ((8, 9), "Ada, Hopper"),
    "tensorwise": ((8, 9), "Ada, Hopper"),
    "blocks": ((10, 0), "Blackwell"),
}
"""From which compute capability on tensor cores multiply what is scaled so, and whose it is."""

SCALES_DOWN, SCALES_ALONG = 128, 4
"""Rows and blocks of a tile of scales, of which kernels take whole ones."""

SCALE_BYTES = 4
CAST_LAUNCHES = 10
"""Kernels of one cast run op by op: the largest value, six of the scale, its product, the cast, and
the scale's reciprocal."""
ORDER_LAUNCHES = 4
"""More of scales of blocks, of either factor, put as tensor cores read them: a cast, rows and
columns added, and a copy."""

RUN_CAST_LAUNCHES = 15
"""Of one cast along the rows of runs: largest values of each run, scales for each row, and rows put
where runs are whole tiles."""
RUN_PLACES_LAUNCHES = 12
"""Of the places where rows of runs of whole tiles lie."""

NARROW_RUNS = "planner.narrow_runs"
PLAIN_OF = {
    "planner.linear": "aten.linear.default",
    "planner.addmm": "aten.addmm.default",
    NARROW_RUNS: GROUPED_MM,
}
"""An op in more bits that a product in 8 bits is, by its packet. Of runs it is that which takes any
dtype: there are several in 16."""


def narrow_op(op: Op, scaling: str) -> Op | None:
    """Return the op with its product in 8 bits; None where there is no such op."""
    if family_of(op.target).deals_rows:
        is_plain = len(op.inputs) == 3 and op.args[:3] == tuple(map(Ref, op.inputs))
        if scaling != "rowwise" or not is_plain or any(op.args[3:]) or op.kwargs:
            return None
        return replace(op, target=f"{NARROW_RUNS}.{scaling}", args=op.args[:3])
    packet = next((name for name, plain in PLAIN_OF.items() if plain == op.target), None)
    multiplied = family_of(op.target).weight_product
    if packet is None or multiplied is None or multiplied(op) is None:
        return None
    return replace(op, target=f"{packet}.{scaling}")


def plain_op(op: Op) -> Op:
    """Return the op in 16 bits where its product is one in 8, else the op."""
    plain = PLAIN_OF.get(op.target.rpartition(".")[0])
    return op if plain is None else replace(op, target=plain)


def scaling_of(op: Op) -> str:
    """Return how the factors of a product in 8 bits are scaled; "" of any other op."""
    packet, _, scaling = op.target.rpartition(".")
    return scaling if packet in PLAIN_OF else ""


def rate_dtype(scaling: str) -> str:
    """Return the dtype under which devices have a rate of products that are scaled so."""
    return BLOCKS_DTYPE if scaling == "blocks" else NARROW_DTYPE


def scales_in_tiles(rows: int, inner: int) -> int:
    """Return how many scales of blocks kernels take of a matrix."""
    down, along = -(-rows // SCALES_DOWN), -(-inner // (BLOCK * SCALES_ALONG))
    return down * SCALES_DOWN * along * SCALES_ALONG


def weight_is_narrow(rows: int, scaling: str) -> bool:
    """Whether the gradient of a weight, a sum over so many rows, is a product in 8 bits."""
    return rows > 0 and rows % TILES[scaling] == 0


def _in_tiles(rule: Rule, weight: int) -> Rule:
    """Return the shardings of a rule under which a rank's part of the weight, the input of that
    number, is still of whole tiles.
    """

    def offered(call: Call) -> Iterator[OpSharding]:
        tile = TILES[scaling_of(call.op)]
        for sharding in rule(call):
            part = local_shape(call.inputs[weight], sharding.inputs[weight], call.axis_size)
            if all(size % tile == 0 for size in part[-2:]):
                yield sharding

    return offered


def _launches(call: Call) -> tuple[int, int]:
    """Both factors of each product are cast; gradients are multiplied by both scales at last, but
    for those of blocks, which the product has applied.
    """
    products_back = sum(call.tensor[n].requires_grad for n in _factors(call.op))
    if scaling_of(call.op) == "blocks":
        each = 2 * (CAST_LAUNCHES + ORDER_LAUNCHES) + 1
        return each, each * max(1, products_back)
    return 2 * CAST_LAUNCHES + 1, (2 * CAST_LAUNCHES + 3) * max(1, products_back)


def _factors(op: Op) -> tuple[str, str]:
    first = family_of(op.target).first_factor
    x, weight = op.inputs[first : first + 2]
    return x, weight


def _sizes(call: KernelCall) -> tuple[int, int, int]:
    """Rows of x, columns of the result of a row, and the inner dim."""
    x, _ = _factors(call.op)
    inner = call.shape(x)[-1]
    return call.numel(x) // max(1, inner), call.shape(call.op.outputs[0])[-1], inner


def _product_peak(
    call: KernelCall, rows: int, columns: int, inner: int, result: int | None = None
) -> int:
    """The most bytes of one product at once: factors in their dtype times their scales, in 8 bits,
    and the result, of so many entries (rows * columns).
    """
    each = call.element_bytes(call.op.outputs[0])
    scaling = scaling_of(call.op)

    def cast(lines: int) -> tuple[int, int]:
        """The peak of a cast of so many lines, and what it leaves."""
        scales = {"rowwise": lines, "tensorwise": 1, "blocks": lines * inner // BLOCK}[scaling]
        left = lines * inner + SCALE_BYTES * scales
        return left + each * lines * inner, left

    (first, kept), (second, both) = cast(rows), cast(columns)
    made = rows * columns if result is None else result
    return max(first, kept + second, kept + both + each * made)


def _saved(call: KernelCall) -> Saved:
    """Factors as they are given, in 16 bits."""
    return Saved(tensors=saved_factors(call, *_factors(call.op)))


def _scratch(call: KernelCall, *, forward: bool) -> int:
    """Casts of a forward, beside its result; of a backward, `_ahead` has them."""
    if not forward:
        return 0
    return _product_peak(call, *_sizes(call)) - call.num_bytes(call.op.outputs[0])


def _ahead(call: KernelCall, needing: Sequence[str]) -> int:
    """Dx of dy and the weight, then dw of dy and x, whose inner dim is the rows."""
    x, weight = _factors(call.op)
    rows, columns, inner = _sizes(call)
    of_x = _product_peak(call, rows, inner, columns) if x in needing else 0
    if weight not in needing or not weight_is_narrow(rows, scaling_of(call.op)):
        return of_x
    made = call.num_bytes(x) if x in needing else 0
    return max(of_x, made + _product_peak(call, columns, inner, rows))


def _narrow(plain: OpFamily, packet: str) -> OpFamily:
    (rule,) = plain.shard
    return replace(
        plain,
        name=f"{plain.name} in 8 bits",
        targets=(packet,),
        shard=(ShardRule(_in_tiles(rule.function, plain.first_factor + 1)),),
        multiplies_in=NARROW_DTYPE,
        kernels=_launches,
        saved=_saved,
        scratch=_scratch,
        ahead=_ahead,
    )


register(_narrow(LINEAR, "planner.linear"))
register(_narrow(ADDMM, "planner.addmm"))


def _run_sizes(call: Call | KernelCall) -> tuple[int, int, int, int]:
    """Rows, runs, the inner dim, and columns of the result."""
    rows, weights = _factors(call.op)
    runs, inner, columns = call.shape(weights)
    return call.shape(rows)[0], runs, inner, columns


def rows_in_tiles(rows: int, runs: int) -> int:
    """Return how many rows there may be at most, in tiles, where each run has whole tiles."""
    return (-(-rows // TILE) + runs) * TILE


def _saved_of_runs(call: KernelCall) -> Saved:
    rows, weights = _factors(call.op)
    return Saved(tensors=(*saved_factors(call, rows, weights), call.op.inputs[2]))


def _launches_of_runs(call: Call) -> tuple[int, int]:
    rows, weights = (call.tensor[name].requires_grad for name in _factors(call.op))
    of_weights = 2 * RUN_CAST_LAUNCHES + RUN_PLACES_LAUNCHES + 1
    return 2 * CAST_LAUNCHES + 1, max(1, (2 * CAST_LAUNCHES + 1) * rows + of_weights * weights)


def _scratch_of_runs(call: KernelCall, *, forward: bool) -> int:
    if not forward:
        return 0
    rows, runs, inner, columns = _run_sizes(call)
    peak = _product_peak(call, rows, runs * columns, inner, rows * columns)
    return peak - call.num_bytes(call.op.outputs[0])


def _ahead_of_runs(call: KernelCall, needing: Sequence[str]) -> int:
    """Dx of dy and the weights, then dw of x and dy, whose rows are put in runs of whole tiles."""
    x, weights = _factors(call.op)
    rows, runs, inner, columns = _run_sizes(call)
    of_x = 0
    if x in needing:
        of_x = _product_peak(call, rows, runs * inner, columns, rows * inner)
    if weights not in needing:
        return of_x
    each = call.element_bytes(call.op.outputs[0])
    made = call.num_bytes(x) if x in needing else 0
    in_tiles = rows_in_tiles(rows, runs)
    places = 2 * _INDEX_BYTES * rows
    # A cast has rows times the scales of their runs beside these.
    first = 2 * each * rows * inner
    second = in_tiles * inner + 2 * each * rows * columns
    product = in_tiles * (inner + columns) + each * runs * inner * columns
    return max(of_x, made + places + max(first, second), made + product)


_INDEX_BYTES = 8

register(
    replace(
        PRODUCTS_OF_RUNS,
        name="products of runs of rows in 8 bits",
        targets=(NARROW_RUNS,),
        shard=(ShardRule(_in_tiles(grouped_mm, 1)),),
        multiplies_in=NARROW_DTYPE,
        kernels=_launches_of_runs,
        saved=_saved_of_runs,
        scratch=_scratch_of_runs,
        ahead=_ahead_of_runs,
    )
)


def cast_elements(call: Call) -> tuple[int, int, int]:
    """Return how many numbers are cast in a forward, for the input's gradient and for the
    weight's; for products of runs the last are cast along their rows.
    """
    x, weight = _factors(call.op)
    of_x, of_weight, made = (prod(call.shape(n)) for n in (x, weight, call.op.outputs[0]))
    rows = of_x // max(1, call.shape(x)[-1])
    is_narrow = family_of(call.op.target).deals_rows or weight_is_narrow(rows, scaling_of(call.op))
    return (
        of_x + of_weight,
        (made + of_weight) * call.tensor[x].requires_grad,
        (made + of_x) * (call.tensor[weight].requires_grad and is_narrow),
    )
