"""Blocks as the ``transformers`` library (5.x) writes them, op for op: Llama, Qwen3, Mixtral and
DeepSeek-V3 in one family, GPT-2 in another.
"""

from __future__ import annotations

from planner.language.graph import Affine
from planner.language.templates.gpt2 import gpt2_layer
from planner.language.templates.preamble import written_positions
from planner.language.templates.routed import experts_of
from planner.language.templates.shared_parts import added, attended, dropped, gated, layer_norm
from planner.language.templates.tape import LAST, Shape, Tape, Value
from planner.language.templates.transformer import Latent, Transformer

BATCH = Affine(1)


def block_names(model: Transformer) -> tuple[str, str, str]:
    """Return what the embedding, a layer (with {} for its number) and the head are called."""
    if model.norm == "layer":
        return "transformer", "transformer.h.{}", "transformer.ln_f"
    return "model.embed_tokens", "model.layers.{}", "model.norm"


def embed(tape: Tape, model: Transformer) -> Value:
    """Write the token embedding, with GPT-2's table of positions."""
    ids = tape.input(BATCH, model.seq_len, dtype="int64", differentiable=False, is_of_batch=True)
    if model.positions != "learned":
        tape.module = "model.embed_tokens"
        return _lookup(tape, model.vocab, model.hidden, ids)
    tape.module = "transformer"
    ids = tape.view(ids, ids.shape, said=(-1, model.seq_len))
    tape.module = "transformer.wte"
    tokens = _lookup(tape, model.vocab, model.hidden, ids)
    tape.module = "transformer"
    positions = written_positions(tape, model.seq_len)
    tape.module = "transformer.wpe"
    places = _lookup(tape, model.max_positions or model.seq_len, model.hidden, positions)
    tape.module = "transformer"
    places = tape.cast(places, model.dtype)
    both = tape.pointwise("aten.add.Tensor", tokens, places)
    tape.module = "transformer.drop"
    return dropped(tape, both, model)


def layer(tape: Tape, model: Transformer, *, dense: bool, differentiable: bool = True) -> Value:
    """Write one layer; `dense` ones have an ordinary feed-forward, and a `differentiable`
    input.
    """
    if model.norm == "layer":
        return gpt2_layer(tape, model, differentiable=differentiable)
    x = tape.input(BATCH, model.seq_len, model.hidden, differentiable=differentiable)
    turn = model.latent.rope_dim if model.latent else model.head_width
    cos, sin = (
        tape.input(1, model.seq_len, turn, differentiable=False) for _ in range(2)
    )  # fmt: skip
    tape.module = "input_layernorm"
    normed, x = _rms_norm(tape, model, x)
    attend = _latent_attention if model.latent else _attention
    x = added(tape, x, attend(tape, model, normed, cos, sin))
    tape.module = "post_attention_layernorm"
    normed, x = _rms_norm(tape, model, x)
    if dense or model.experts is None:
        return added(tape, x, gated(tape, normed, model.ffn_hidden, "mlp"))
    return added(tape, x, experts_of(tape, model, model.experts, normed))


def head(tape: Tape, model: Transformer) -> Value:
    """Write the last norm, the product with the vocabulary and the loss."""
    x = tape.input(BATCH, model.seq_len, model.hidden)
    labels = tape.input(BATCH, model.seq_len, dtype="int64", differentiable=False, is_of_batch=True)
    if model.norm == "layer":
        tape.module = "transformer.ln_f"
        x = layer_norm(tape, x)
        tape.module = "transformer"
        x = tape.view(x, x.shape, said=(-1, model.seq_len, model.hidden))
    else:
        tape.module = "model.norm"
        x, _ = _rms_norm(tape, model, x)
    tape.module = "lm_head"
    logits = tape.linear(x, model.vocab, split="columns")
    tape.module = ""
    logits = tape.cast(logits, "float32")
    shifted = tape.call(
        "aten.pad.default",
        labels,
        (0, 1),
        "constant",
        -100.0,
        shapes=((BATCH, model.seq_len + 1),),
    )[0]
    shifted = tape.slice(shifted, 1, 1, LAST)
    shifted = tape.call("aten.contiguous.default", shifted, shapes=(shifted.shape,))[0]
    rows = Affine(model.seq_len)
    logits = tape.view(logits, (rows, model.vocab), said=(-1, model.vocab), place="S(1)")
    shifted = tape.cast(tape.view(shifted, (rows,), said=(-1,)), "int64")
    return tape.call("aten.cross_entropy_loss.default", logits, shifted, shapes=((),))[0]


def _lookup(tape: Tape, rows: int, width: int, ids: Value) -> Value:
    table = tape.param("weight", rows, width)
    return tape.call("aten.embedding.default", table, ids, shapes=((*ids.shape, width),))[0]


def _rms_norm(tape: Tape, model: Transformer, x: Value) -> tuple[Value, Value]:
    """Return the norm, and its input: a tensor that is in fp32 is its own cast."""
    wide = tape.cast(x, "float32")
    squares = tape.pointwise("aten.pow.Tensor_Scalar", wide, 2)
    mean = tape.call("aten.mean.dim", squares, (-1,), True, shapes=((*x.shape[:-1], 1),))[0]
    scale = tape.pointwise(
        "aten.rsqrt.default", tape.pointwise("aten.add.Tensor", mean, model.epsilon)
    )
    scaled = tape.cast(tape.pointwise("aten.mul.Tensor", wide, scale), tape.dtype)
    width = x.shape[-1]
    assert isinstance(width, int)
    weight = tape.param("weight", width)
    return tape.pointwise("aten.mul.Tensor", weight, scaled), x if x.dtype != "float32" else wide


def _attention(tape: Tape, model: Transformer, x: Value, cos: Value, sin: Value) -> Value:
    width, s = model.head_width, model.seq_len

    def heads(name: str, number: int, *, normed: bool = False) -> Value:
        tape.module = f"self_attn.{name}_proj"
        made = tape.linear(x, number * width, split="columns")
        tape.module = "self_attn"
        made = tape.view(made, (BATCH, s, number, width), said=(BATCH, s, -1, width))
        if normed:
            tape.module = f"self_attn.{name}_norm"
            made, _ = _rms_norm(tape, model, made)
            tape.module = "self_attn"
        return tape.transpose(made, 1, 2)

    query = heads("q", model.heads, normed=model.query_key_norm)
    key = heads("k", model.kv_heads, normed=model.query_key_norm)
    value = heads("v", model.kv_heads)
    cos, sin = tape.unsqueeze(cos, 1), tape.unsqueeze(sin, 1)
    query, key = (_turned(tape, each, cos, sin, width) for each in (query, key))
    return attended(tape, model, query, key, value, scale=width**-0.5)


def _turned(tape: Tape, x: Value, cos: Value, sin: Value, width: int) -> Value:
    """Rotary positions: each head's halves are turned against each other."""
    straight = tape.pointwise("aten.mul.Tensor", x, cos)
    first = tape.slice(x, 3, 0, width // 2)
    second = tape.slice(x, 3, width // 2, LAST)
    crossed = tape.cat((tape.pointwise("aten.neg.default", second), first))
    return tape.pointwise(
        "aten.add.Tensor", straight, tape.pointwise("aten.mul.Tensor", crossed, sin)
    )


def _latent_attention(tape: Tape, model: Transformer, x: Value, cos: Value, sin: Value) -> Value:
    latent = model.latent
    assert latent is not None
    s, plain, turn, heads = model.seq_len, model.head_width, latent.rope_dim, model.heads
    name = "q"
    source = x
    if latent.query_rank:
        tape.module = "self_attn.q_a_proj"
        source = tape.linear(x, latent.query_rank)
        tape.module = "self_attn.q_a_layernorm"
        source, _ = _rms_norm(tape, model, source)
        name = "q_b"
    tape.module = f"self_attn.{name}_proj"
    query = tape.linear(source, heads * (plain + turn), split="columns")
    tape.module = "self_attn"
    query = tape.view(query, (BATCH, s, heads, plain + turn), said=(BATCH, s, -1, plain + turn))
    still, moved = tape.split(tape.transpose(query, 1, 2), (plain, turn), -1)
    tape.module = "self_attn.kv_a_proj_with_mqa"
    narrow = tape.linear(x, latent.key_rank + turn)
    tape.module = "self_attn"
    narrow, key_turn = tape.split(narrow, (latent.key_rank, turn), -1)
    tape.module = "self_attn.kv_a_layernorm"
    narrow, _ = _rms_norm(tape, model, narrow)
    tape.module = "self_attn"
    narrow = tape.view(narrow, (BATCH, 1, s, latent.key_rank))
    key_turn = tape.view(key_turn, (BATCH, 1, s, turn))
    query_turn, key_turn = _turned_in_pairs(tape, latent, moved, key_turn, cos, sin)
    query = tape.cat((still, query_turn))
    tape.module = "self_attn.kv_b_proj"
    wide = tape.linear(narrow, heads * 2 * plain, split="columns")
    tape.module = "self_attn"
    wide = tape.view(wide, (BATCH, s, heads, 2 * plain), said=(BATCH, s, -1, 2 * plain))
    wide = tape.transpose(wide, 1, 2)
    key_still, value = tape.split(wide, (plain, plain), -1)
    shape: Shape = (BATCH, heads, s, plain + turn)
    key_turn = tape.call(
        "aten.expand.default", key_turn, (-1, heads, -1, -1), shapes=((BATCH, heads, s, turn),)
    )[0]
    key = tape.call(
        "aten.new_empty.default",
        wide,
        shape,
        shapes=(shape,),
        kwargs=(("pin_memory", False),),
    )[0]
    for piece, start, end in ((key_still, 0, plain), (key_turn, plain, LAST)):
        key = tape.call("aten.slice_scatter.default", key, piece, 3, start, end, shapes=(shape,))[0]
    return attended(tape, model, query, key, value, scale=(plain + turn) ** -0.5)


def _turned_in_pairs(
    tape: Tape, latent: Latent, query: Value, key: Value, cos: Value, sin: Value
) -> tuple[Value, Value]:
    """Rotary positions of entries that lie next to each other."""
    half = latent.rope_dim // 2
    cos, sin = (tape.unsqueeze(tape.slice(each, 2, 0, half), 1) for each in (cos, sin))
    pairs = [
        tuple(tape.slice(each, 3, start, LAST, 2) for start in (0, 1)) for each in (query, key)
    ]

    def turned(even: Value, odd: Value) -> Value:
        def product(x: Value, y: Value) -> Value:
            return tape.pointwise("aten.mul.Tensor", x, y)

        first = tape.pointwise("aten.sub.Tensor", product(even, cos), product(odd, sin))
        second = tape.pointwise("aten.add.Tensor", product(odd, cos), product(even, sin))
        return tape.cat((first, second))

    return turned(*pairs[0]), turned(*pairs[1])
