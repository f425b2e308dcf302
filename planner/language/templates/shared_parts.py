"""Parts that several models of the ``transformers`` library have alike."""

from __future__ import annotations

from planner.language.graph import Affine
from planner.language.templates.tape import Tape, Value
from planner.language.templates.transformer import Transformer

BATCH = Affine(1)


def dropped(tape: Tape, x: Value, model: Transformer) -> Value:
    """Write dropout, which the code has even where it drops nothing."""
    return tape.pointwise("aten.dropout.default", x, 0.1 if model.dropout else 0.0, True)


def added(tape: Tape, x: Value, more: Value) -> Value:
    """Write the sum that a half of a layer ends with."""
    tape.module = ""
    return tape.pointwise("aten.add.Tensor", x, more)


def attended(
    tape: Tape,
    model: Transformer,
    query: Value,
    key: Value,
    value: Value,
    *,
    scale: float,
    out: str = "o_proj",
) -> Value:
    """Write causal attention of heads in dim 1, and the heads side by side; then the product that
    follows, which GPT-2 writes otherwise.
    """
    s, width = model.seq_len, value.shape[-1]
    assert isinstance(width, int)
    shape = (*query.shape[:-1], width)
    attended = tape.call(
        "aten.scaled_dot_product_attention.default",
        query,
        key,
        value,
        None,
        0.0,
        True,
        shapes=(shape,),
        places=(query.place,),
        kwargs=(("scale", scale), *shared_heads(query, key)),
    )[0]
    reshape = "aten.reshape.default"
    attended = tape.view(attended, shape, said=(BATCH, -1, s, width), target=reshape)
    turned = tape.transpose(attended, 1, 2)
    turned = tape.call(
        "aten.contiguous.default", turned, shapes=(turned.shape,), places=(turned.place,)
    )[0]
    joined = tape.view(turned, (BATCH, s, model.heads * width), said=(BATCH, s, -1), target=reshape)
    if out == "c_proj":
        return joined
    tape.module = f"self_attn.{out}"
    return tape.linear(joined, model.hidden, split="rows")


def gated(tape: Tape, x: Value, width: int, module: str) -> Value:
    """Write a feed-forward of three matrices."""
    tape.module = f"{module}.gate_proj"
    gate = tape.linear(x, width, split="columns")
    tape.module = f"{module}.act_fn"
    gate = tape.pointwise("aten.silu.default", gate)
    tape.module = f"{module}.up_proj"
    up = tape.linear(x, width, split="columns")
    tape.module = module
    both = tape.pointwise("aten.mul.Tensor", gate, up)
    tape.module = f"{module}.down_proj"
    return tape.linear(both, width_of(x), split="rows")


def shared_heads(query: Value, key: Value) -> tuple[tuple[str, bool], ...]:
    """Return the option of attention whose heads of keys are each that of several of queries."""
    return (("enable_gqa", True),) if key.shape[1] != query.shape[1] else ()


def width_of(x: Value) -> int:
    """Return the width of the last dim."""
    width = x.shape[-1]
    assert isinstance(width, int)
    return width


def layer_norm(tape: Tape, x: Value) -> Value:
    """Write a norm with a mean and a bias."""
    width = width_of(x)
    weight, bias = tape.param("weight", width), tape.param("bias", width)
    return tape.call(
        "aten.layer_norm.default",
        x,
        (width,),
        weight,
        bias,
        1e-5,
        False,
        shapes=(x.shape,),
        places=(x.place,),
    )[0]
