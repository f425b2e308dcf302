"""Experts as the ``transformers`` library writes them: Mixtral's router and DeepSeek-V3's."""

from __future__ import annotations

from planner.language.graph import Affine
from planner.language.ops.families.entries.routing import SORT_ROWS, UNSORT_ROWS
from planner.language.templates.shared_parts import gated, width_of
from planner.language.templates.tape import Shape, Tape, Value
from planner.language.templates.transformer import Experts, Transformer

BATCH = Affine(1)


def experts_of(tape: Tape, model: Transformer, experts: Experts, x: Value) -> Value:
    """Tokens are sorted by expert, multiplied group by group, and put back."""
    rows = Affine(model.seq_len)
    if experts.groups:
        tape.module = "mlp.gate"
        weights, chosen = _sigmoid_router(tape, model, experts, x, rows)
        tape.module = "mlp"
        flat = tape.view(x, (rows, model.hidden), said=(-1, model.hidden))
    else:
        tape.module = "mlp"
        flat = tape.view(x, (rows, model.hidden), said=(-1, model.hidden))
        tape.module = "mlp.gate"
        weights, chosen = _softmax_router(tape, model, experts, flat, rows)
    mixed = _mixed(tape, model, experts, flat, weights, chosen)
    tape.module = "mlp"
    target = "aten.view.default" if experts.groups else "aten.reshape.default"
    back = tape.view(mixed, (BATCH, model.seq_len, model.hidden), target=target)
    if not experts.width_of_shared:
        return back
    shared = gated(tape, x, experts.width_of_shared, "mlp.shared_experts")
    tape.module = "mlp"
    return tape.pointwise("aten.add.Tensor", back, shared)


def _topk(tape: Tape, x: Value, number: int, *more: int | bool) -> tuple[Value, Value]:
    shape = (*x.shape[:-1], number)
    values, indices = tape.call(
        "aten.topk.default",
        x,
        number,
        *more,
        shapes=(shape, shape),
        dtypes=(x.dtype, "int64"),
        places=("R", "R"),
    )
    return values, indices


def _sum(tape: Tape, x: Value, *args: object, shape: Shape) -> Value:
    return tape.call("aten.sum.dim_IntList", x, *args, shapes=(shape,))[0]  # type: ignore[arg-type]


def _softmax_router(
    tape: Tape, model: Transformer, experts: Experts, flat: Value, rows: Affine
) -> tuple[Value, Value]:
    same = tape.view(flat, flat.shape, said=(-1, model.hidden), target="aten.reshape.default")
    scores = tape.cast(tape.linear(same, experts.number), "float32")
    scores = tape.pointwise("aten.softmax.int", scores, -1)
    best, chosen = _topk(tape, scores, experts.per_token)
    total = _sum(tape, best, (-1,), True, shape=(rows, 1))
    return tape.pointwise("aten.div.Tensor", best, total), chosen


def _sigmoid_router(
    tape: Tape, model: Transformer, experts: Experts, x: Value, rows: Affine
) -> tuple[Value, Value]:
    groups, number = experts.groups, experts.number
    flat = tape.cast(tape.view(x, (rows, model.hidden), said=(-1, model.hidden)), "float32")
    weight = tape.cast(tape.param("weight", number, model.hidden), "float32")
    logits = tape.call("aten.linear.default", flat, weight, shapes=((rows, number),))[0]
    scores = tape.pointwise("aten.sigmoid.default", logits)
    shift = tape.param("e_score_correction_bias", number, dtype="float32", kind="buffer")
    shifted = tape.pointwise("aten.add.Tensor", scores, shift)
    grouped = tape.view(
        shifted, (rows, groups, number // groups), said=(-1, groups, number // groups)
    )
    best, _ = _topk(tape, grouped, 2)
    of_group = _sum(tape, best, (-1,), shape=(rows, groups))
    _, picked = _topk(tape, of_group, max(1, groups // 2), -1, True, False)
    mask = tape.call(
        "aten.zeros_like.default",
        of_group,
        shapes=(of_group.shape,),
        kwargs=(("pin_memory", False),),
    )[0]
    mask = tape.call("aten.scatter.value", mask, 1, picked, 1, shapes=(mask.shape,))[0]
    mask = tape.unsqueeze(mask, -1)
    wide: Shape = (rows, groups, number // groups)
    mask = tape.call("aten.expand.default", mask, (-1, *wide[1:]), shapes=(wide,))[0]
    mask = tape.view(mask, (rows, number), said=(-1, number), target="aten.reshape.default")
    mask = tape.pointwise("aten.bitwise_not.default", tape.cast(mask, "bool"))
    allowed = tape.call(
        "aten.masked_fill.Scalar", shifted, mask, float("-inf"), shapes=(shifted.shape,)
    )[0]
    _, chosen = _topk(tape, allowed, experts.per_token, -1, True, False)
    picked_shape = (rows, experts.per_token)
    weights = tape.call("aten.gather.default", scores, 1, chosen, shapes=(picked_shape,))[0]
    total = tape.pointwise(
        "aten.add.Tensor", _sum(tape, weights, (-1,), True, shape=(rows, 1)), 1e-20
    )
    weights = tape.pointwise("aten.div.Tensor", weights, total)
    return tape.pointwise("aten.mul.Tensor", weights, 2.5), chosen


def _mixed(
    tape: Tape,
    model: Transformer,
    experts: Experts,
    flat: Value,
    weights: Value,
    chosen: Value,
) -> Value:
    number, per_token = experts.number, experts.per_token
    copies = Affine(model.seq_len * per_token)
    tape.module = "mlp.experts"
    rows, order, ends = tape.call(
        SORT_ROWS,
        flat,
        chosen,
        number,
        shapes=((copies, model.hidden), (copies,), (number,)),
        dtypes=(flat.dtype, "int64", "int32"),
    )

    def product(x: Value, name: str, width: int) -> Value:
        inner = width_of(x)
        weight = tape.param(name, number, width, inner)
        weight = tape.call("aten.transpose.int", weight, -2, -1, shapes=((number, inner, width),))[
            0
        ]
        x = tape.cast(x, model.dtype)
        # The library takes torch's kernel where that multiplies the dtype, else its own loop.
        own = (
            "aten._grouped_mm" if model.dtype == "bfloat16" else "transformers.grouped_mm_fallback"
        )
        return tape.call(
            f"{own}.default",
            x,
            weight,
            ends,
            shapes=((copies, width),),
        )[0]

    both = product(rows, "gate_up_proj", 2 * experts.width)
    half: Shape = (copies, experts.width)
    gate, up = tape.call("aten.chunk.default", both, 2, -1, shapes=(half, half))
    tape.module = "mlp.experts.act_fn"
    gate = tape.pointwise("aten.silu.default", gate)
    tape.module = "mlp.experts"
    made = product(tape.pointwise("aten.mul.Tensor", gate, up), "down_proj", model.hidden)
    total = tape.call(
        UNSORT_ROWS,
        made,
        order,
        weights,
        per_token,
        shapes=((Affine(model.seq_len), model.hidden),),
        dtypes=(weights.dtype,),
    )[0]
    return tape.cast(total, model.dtype)
