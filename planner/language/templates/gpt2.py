"""Layers of GPT-2 as the ``transformers`` library writes them."""

from __future__ import annotations

from planner.language.graph import Affine
from planner.language.templates.shared_parts import added, attended, dropped, layer_norm, width_of
from planner.language.templates.tape import Tape, Value
from planner.language.templates.transformer import Transformer

BATCH = Affine(1)


def gpt2_layer(tape: Tape, model: Transformer, *, differentiable: bool = True) -> Value:
    """Write one layer, whose input is `differentiable`."""
    s, width, hidden = model.seq_len, model.head_width, model.hidden
    x = tape.input(BATCH, s, hidden, differentiable=differentiable)
    tape.module = "ln_1"
    normed = layer_norm(tape, x)
    joined = _conv1d(tape, normed, 3 * hidden, "attn.c_attn")
    tape.module = "attn"
    parts = tape.call("aten.split.Tensor", joined, hidden, 2, shapes=((BATCH, s, hidden),) * 3)

    def heads(part: Value) -> Value:
        shape = (BATCH, s, model.heads, width)
        return tape.transpose(tape.view(part, shape, said=(BATCH, s, -1, width)), 1, 2)

    key, value, query = (heads(parts[i]) for i in (1, 2, 0))
    joined_heads = attended(tape, model, query, key, value, scale=width**-0.5, out="c_proj")
    made = _conv1d(tape, joined_heads, hidden, "attn.c_proj")
    tape.module = "attn.resid_dropout"
    made = dropped(tape, made, model)
    x = added(tape, made, x)
    tape.module = "ln_2"
    normed = layer_norm(tape, x)
    wide = _conv1d(tape, normed, model.ffn_hidden, "mlp.c_fc")
    tape.module = "mlp.act"
    made = _conv1d(tape, _gelu_by_parts(tape, wide), hidden, "mlp.c_proj")
    tape.module = "mlp.dropout"
    return added(tape, x, dropped(tape, made, model))


def _conv1d(tape: Tape, x: Value, width: int, module: str) -> Value:
    """GPT-2's products keep their matrix the other way round."""
    tape.module = module
    inner, rows = width_of(x), Affine(int(x.shape[1]))  # type: ignore[arg-type]
    flat = tape.view(x, (rows, inner), said=(-1, inner))
    bias, weight = tape.param("bias", width), tape.param("weight", inner, width)
    made = tape.call("aten.addmm.default", bias, flat, weight, shapes=((rows, width),))[0]
    return tape.view(made, (*x.shape[:-1], width))


def _gelu_by_parts(tape: Tape, x: Value) -> Value:
    def times(y: Value, factor: float) -> Value:
        return tape.pointwise("aten.mul.Tensor", y, factor)

    half = times(x, 0.5)
    cube = times(tape.pointwise("aten.pow.Tensor_Scalar", x, 3.0), 0.044715)
    inner = times(tape.pointwise("aten.add.Tensor", x, cube), 0.7978845608028654)
    curve = tape.pointwise("aten.tanh.default", inner)
    return tape.pointwise("aten.mul.Tensor", half, tape.pointwise("aten.add.Tensor", curve, 1.0))
