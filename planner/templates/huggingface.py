"""Blocks as the ``transformers`` library (5.x) writes them, op for op: Llama, Qwen3, Mixtral and
DeepSeek-V3 in one family, GPT-2 in another.
"""

from __future__ import annotations

from planner.graph import Affine, Symbol
from planner.templates.preamble import written_positions
from planner.templates.tape import LAST, Shape, Tape, Value
from planner.templates.transformer import Experts, Latent, Transformer

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
    return _dropped(tape, both, model)


def layer(tape: Tape, model: Transformer, *, dense: bool) -> Value:
    """Write one layer; `dense` ones have an ordinary feed-forward."""
    if model.norm == "layer":
        return _gpt2_layer(tape, model)
    x = tape.input(BATCH, model.seq_len, model.hidden)
    turn = model.latent.rope_dim if model.latent else model.head_width
    cos, sin = (
        tape.input(1, model.seq_len, turn, differentiable=False) for _ in range(2)
    )  # fmt: skip
    mask = tape.input(BATCH, 1, model.seq_len, model.seq_len, dtype="bool", differentiable=False)
    tape.module = "input_layernorm"
    normed, x = _rms_norm(tape, model, x)
    attend = _latent_attention if model.latent else _attention
    x = _added(tape, x, attend(tape, model, normed, cos, sin, mask))
    tape.module = "post_attention_layernorm"
    normed, x = _rms_norm(tape, model, x)
    if dense or model.experts is None:
        return _added(tape, x, _gated(tape, normed, model.ffn_hidden, "mlp"))
    return _added(tape, x, _experts(tape, model, model.experts, normed))


def head(tape: Tape, model: Transformer) -> Value:
    """Write the last norm, the product with the vocabulary and the loss."""
    x = tape.input(BATCH, model.seq_len, model.hidden)
    labels = tape.input(BATCH, model.seq_len, dtype="int64", differentiable=False, is_of_batch=True)
    if model.norm == "layer":
        tape.module = "transformer.ln_f"
        x = _layer_norm(tape, x)
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


def _dropped(tape: Tape, x: Value, model: Transformer) -> Value:
    return tape.pointwise("aten.dropout.default", x, 0.1 if model.dropout else 0.0, True)


def _added(tape: Tape, x: Value, more: Value) -> Value:
    tape.module = ""
    return tape.pointwise("aten.add.Tensor", x, more)


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


def _attention(
    tape: Tape, model: Transformer, x: Value, cos: Value, sin: Value, mask: Value
) -> Value:
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
    if model.kv_heads != model.heads:
        key, value = (_repeated(tape, each, model) for each in (key, value))
    return _attended(tape, model, query, key, value, mask, scale=width**-0.5)


def _turned(tape: Tape, x: Value, cos: Value, sin: Value, width: int) -> Value:
    """Rotary positions: each head's halves are turned against each other."""
    straight = tape.pointwise("aten.mul.Tensor", x, cos)
    first = tape.slice(x, 3, 0, width // 2)
    second = tape.slice(x, 3, width // 2, LAST)
    crossed = tape.cat((tape.pointwise("aten.neg.default", second), first))
    return tape.pointwise(
        "aten.add.Tensor", straight, tape.pointwise("aten.mul.Tensor", crossed, sin)
    )


def _repeated(tape: Tape, x: Value, model: Transformer) -> Value:
    """Keys or values, once for each query head that shares them."""
    groups, (_, heads, s, width) = model.heads // model.kv_heads, x.shape
    wide = tape.unsqueeze(x, 2)
    shape: Shape = (BATCH, heads, groups, s, width)
    wide = tape.call("aten.expand.default", wide, shape, shapes=(shape,))[0]
    return tape.view(
        wide, (BATCH, model.heads, s, width), target="aten.reshape.default", place=x.place
    )


def _attended(
    tape: Tape,
    model: Transformer,
    query: Value,
    key: Value,
    value: Value,
    mask: Value,
    *,
    scale: float,
    out: str = "o_proj",
) -> Value:
    s, width = model.seq_len, value.shape[-1]
    assert isinstance(width, int)
    shape = (*query.shape[:-1], width)
    attended = tape.call(
        "aten.scaled_dot_product_attention.default",
        query,
        key,
        value,
        mask,
        shapes=(shape,),
        places=(query.place,),
        kwargs=(("scale", scale),),
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


def _latent_attention(
    tape: Tape, model: Transformer, x: Value, cos: Value, sin: Value, mask: Value
) -> Value:
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
    return _attended(tape, model, query, key, value, mask, scale=(plain + turn) ** -0.5)


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


def _gated(tape: Tape, x: Value, width: int, module: str) -> Value:
    tape.module = f"{module}.gate_proj"
    gate = tape.linear(x, width, split="columns")
    tape.module = f"{module}.act_fn"
    gate = tape.pointwise("aten.silu.default", gate)
    tape.module = f"{module}.up_proj"
    up = tape.linear(x, width, split="columns")
    tape.module = module
    both = tape.pointwise("aten.mul.Tensor", gate, up)
    tape.module = f"{module}.down_proj"
    return tape.linear(both, tape_hidden(x), split="rows")


def tape_hidden(x: Value) -> int:
    """Return the width of the last dim."""
    width = x.shape[-1]
    assert isinstance(width, int)
    return width


def _experts(tape: Tape, model: Transformer, experts: Experts, x: Value) -> Value:
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
    if not experts.shared:
        return back
    shared = _gated(tape, x, experts.shared * experts.width, "mlp.shared_experts")
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
    reshape = "aten.reshape.default"
    tape.module = "mlp.experts"
    weights = tape.view(weights, (copies,), said=(-1,), target=reshape)
    chosen = tape.view(chosen, (copies,), said=(-1,), target=reshape)
    ordered, order = tape.call(
        "aten.sort.default", chosen, shapes=((copies,),) * 2, dtypes=("int64",) * 2
    )
    token = tape.pointwise("aten.floor_divide.default", order, per_token)
    rows = _picked(tape, flat, token, (copies, model.hidden))
    weights = _picked(tape, weights, order, (copies,))
    ends = tape.cast(tape.cast(ordered, "int32"), "float32")
    counts = tape.call("aten.histc.default", ends, number, 0, number - 1, shapes=((number,),))[0]
    counts = tape.cast(counts, "int32")
    ends = tape.call(
        "aten.cumsum.default",
        counts,
        0,
        shapes=((number,),),
        kwargs=(("dtype", Symbol("dtype", "int32")),),
    )[0]

    def product(x: Value, name: str, width: int) -> Value:
        inner = tape_hidden(x)
        weight = tape.param(name, number, width, inner)
        weight = tape.call("aten.transpose.int", weight, -2, -1, shapes=((number, inner, width),))[
            0
        ]
        x = tape.cast(x, model.dtype)
        return tape.call(
            "transformers.grouped_mm_fallback.default",
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
    made = tape.pointwise("aten.mul.Tensor", made, tape.unsqueeze(weights, -1))
    back = tape.call(
        "aten.empty_like.default",
        order,
        shapes=((copies,),),
        kwargs=(("pin_memory", False),),
    )[0]
    device = (("device", Symbol("device")), ("pin_memory", False))
    counted = tape.call(
        "aten.arange.default", copies, shapes=((copies,),), dtypes=("int64",), kwargs=device
    )[0]
    back = tape.call("aten.index_put.default", back, (order,), counted, shapes=((copies,),))[0]
    made = _picked(tape, made, back, (copies, model.hidden))
    made = tape.view(made, (Affine(model.seq_len), per_token, model.hidden))
    total = _sum(tape, made, (1,), shape=(Affine(model.seq_len), model.hidden))
    return tape.cast(total, model.dtype)


def _picked(tape: Tape, x: Value, index: Value, shape: Shape) -> Value:
    return tape.call("aten.index.Tensor", x, (index,), shapes=(shape,))[0]


# ------------------------------------------------------------------------------------------ GPT-2


def _gpt2_layer(tape: Tape, model: Transformer) -> Value:
    s, width, hidden = model.seq_len, model.head_width, model.hidden
    x = tape.input(BATCH, s, hidden)
    mask = tape.input(BATCH, 1, s, s, dtype="bool", differentiable=False)
    tape.module = "ln_1"
    normed = _layer_norm(tape, x)
    joined = _conv1d(tape, normed, 3 * hidden, "attn.c_attn")
    tape.module = "attn"
    parts = tape.call("aten.split.Tensor", joined, hidden, 2, shapes=((BATCH, s, hidden),) * 3)

    def heads(part: Value) -> Value:
        shape = (BATCH, s, model.heads, width)
        return tape.transpose(tape.view(part, shape, said=(BATCH, s, -1, width)), 1, 2)

    key, value, query = (heads(parts[i]) for i in (1, 2, 0))
    attended = _attended(tape, model, query, key, value, mask, scale=width**-0.5, out="c_proj")
    made = _conv1d(tape, attended, hidden, "attn.c_proj")
    tape.module = "attn.resid_dropout"
    made = _dropped(tape, made, model)
    x = _added(tape, made, x)
    tape.module = "ln_2"
    normed = _layer_norm(tape, x)
    wide = _conv1d(tape, normed, model.ffn_hidden, "mlp.c_fc")
    tape.module = "mlp.act"
    made = _conv1d(tape, _gelu_by_parts(tape, wide), hidden, "mlp.c_proj")
    tape.module = "mlp.dropout"
    return _added(tape, x, _dropped(tape, made, model))


def _layer_norm(tape: Tape, x: Value) -> Value:
    width = tape_hidden(x)
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


def _conv1d(tape: Tape, x: Value, width: int, module: str) -> Value:
    """GPT-2's products keep their matrix the other way round."""
    tape.module = module
    inner, rows = tape_hidden(x), Affine(int(x.shape[1]))  # type: ignore[arg-type]
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
