"""Blocks as trainers of large models write them: one call where libraries have one.

Queries, keys and values are one product, dealt by key head as Megatron-LM does, so that tp ranks
have whole heads; the two first matrices of a gated feed-forward are one.
"""

from __future__ import annotations

from planner.language.graph import Affine
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, SORT_ROWS, UNSORT_ROWS
from planner.language.ops.families.products.matmul import GROUPED_MM
from planner.language.templates.shared_parts import shared_heads, width_of
from planner.language.templates.tape import (
    COUNTS,
    LAST,
    ORDER,
    ROWS,
    STREAM,
    Tape,
    Value,
    experts_place,
)
from planner.language.templates.transformer import Experts, Transformer

BATCH = Affine(1)


def block_names(model: Transformer) -> tuple[str, str, str]:
    """Return what the embedding, a layer (with {} for its number) and the head are called."""
    return "embedding", "decoder.layers.{}", "output_layer"


def embed(tape: Tape, model: Transformer) -> Value:
    """Write the token embedding, whose rows tp ranks share, and a table of positions."""
    ids = tape.input(BATCH, model.seq_len, dtype="int64", differentiable=False, is_of_batch=True)
    tape.module = "embedding"
    x = _lookup(tape, "word_embeddings", model.vocab, model.hidden, ids, place="S(0)")
    if model.positions == "learned":
        positions = tape.input(1, model.seq_len, dtype="int64", differentiable=False)
        rows = model.max_positions or model.seq_len
        places = _lookup(tape, "position_embeddings", rows, model.hidden, positions)
        x = tape.pointwise("aten.add.Tensor", x, places, takes=(STREAM, STREAM))
    return _dropped(tape, x, model, "embedding.dropout")


def layer(tape: Tape, model: Transformer, *, dense: bool, differentiable: bool = True) -> Value:
    """Write one layer; `dense` ones have an ordinary feed-forward, and a `differentiable`
    input.
    """
    x = tape.input(BATCH, model.seq_len, model.hidden, differentiable=differentiable, place=STREAM)
    memory = None
    if model.encoder is not None:
        memory = tape.input(BATCH, model.encoder.seq_len, model.hidden, place=STREAM)
    turned: tuple[Value, ...] = ()
    if model.positions == "rotary":
        width = model.latent.rope_dim if model.latent else model.head_width
        turned = tuple(tape.input(1, model.seq_len, width, differentiable=False) for _ in range(2))
    normed = _norm(tape, x, model, "input_layernorm")
    attend = _latent if model.latent else _attention
    x = _added(tape, x, attend(tape, model, normed, turned), model, "self_attention")
    if memory is not None:
        normed = _norm(tape, x, model, "pre_cross_attn_layernorm")
        x = _added(tape, x, _crossed(tape, model, normed, memory), model, "cross_attention")
    normed = _norm(tape, x, model, "pre_mlp_layernorm")
    if dense or model.experts is None:
        made = _feed_forward(tape, model, normed, model.ffn_hidden, "mlp")
    else:
        made = _experts(tape, model, model.experts, normed)
    return _added(tape, x, made, model, "mlp")


def memory(tape: Tape, model: Transformer) -> Value:
    """Write the last norm of an encoder, whose result a decoder's layers attend to."""
    x = tape.input(BATCH, model.seq_len, model.hidden, place=STREAM)
    return _norm(tape, x, model, "encoder.final_layernorm")


def head(tape: Tape, model: Transformer) -> Value:
    """Write the last norm, the product with the vocabulary and the loss, of each token that is
    predicted.
    """
    x = tape.input(BATCH, model.seq_len, model.hidden, place=STREAM)
    labels = tape.input(BATCH, model.seq_len, dtype="int64", differentiable=False, is_of_batch=True)
    # What predicts further ahead joins the stream with a token's embedding, both normed.
    later = []
    for depth in range(model.ahead):
        parts = [_norm(tape, x, model, f"ahead.{depth}.{part}") for part in ("stream", "token")]
        tape.module = f"ahead.{depth}.proj"
        later.append(
            _norm(
                tape, tape.linear(tape.cat((*parts,)), model.hidden), model, f"ahead.{depth}.norm"
            )
        )
    x = _norm(tape, x, model, "final_layernorm")
    if model.transforms_head:
        tape.module = "lm_head.dense"
        x = tape.linear(x, model.hidden, bias=model.bias)
        x = _norm(tape, tape.pointwise("aten.gelu.default", x), model, "lm_head.layer_norm")
    tape.module = "output_layer"
    logits = tape.linear(x, model.vocab, split="columns")
    weight = tape.params[-1]
    loss = _loss(tape, model, logits, labels)
    for each in later:
        tape.module = "output_layer"
        logits = tape.call(
            "aten.linear.default",
            each,
            weight,
            shapes=(logits.shape,),
            takes=("R", weight.place),
            places=(logits.place,),
        )[0]
        loss = tape.pointwise("aten.add.Tensor", loss, _loss(tape, model, logits, labels))
    return loss


def _loss(tape: Tape, model: Transformer, logits: Value, labels: Value) -> Value:
    tape.module = "loss"
    rows = Affine(model.seq_len)
    logits = tape.view(logits, (rows, model.vocab), said=(-1, model.vocab), place="S(1)")
    labels = tape.view(labels, (rows,), said=(-1,))
    return tape.call(
        "aten.cross_entropy_loss.default",
        logits,
        labels,
        shapes=((),),
        dtypes=("float32",),
    )[0]


def _lookup(tape: Tape, name: str, rows: int, width: int, ids: Value, *, place: str = "R") -> Value:
    table = tape.param(name, rows, width, place=place)
    made = "P" if place == "S(0)" else "R"
    return tape.call(
        "aten.embedding.default", table, ids, shapes=((*ids.shape, width),), places=(made,)
    )[0]


def _dropped(tape: Tape, x: Value, model: Transformer, module: str) -> Value:
    if not model.dropout:
        return x
    tape.module = module
    return tape.pointwise("aten.dropout.default", x, 0.1, True)


def _added(tape: Tape, x: Value, more: Value, model: Transformer, module: str) -> Value:
    more = _dropped(tape, more, model, f"{module}.add")
    tape.module = f"{module}.add"
    return tape.pointwise("aten.add.Tensor", x, more)


def _norm(tape: Tape, x: Value, model: Transformer, module: str) -> Value:
    tape.module = module
    width = width_of(x)
    weight = tape.param("weight", width)
    is_rms = model.norm == "rms"
    target = "aten.rms_norm.default" if is_rms else "aten.layer_norm.default"
    more = (weight,) if is_rms else (weight, tape.param("bias", width))
    return tape.call(
        target, x, (width,), *more, model.epsilon, shapes=(x.shape,), places=(x.place,)
    )[0]


def _attention(tape: Tape, model: Transformer, x: Value, turned: tuple[Value, ...]) -> Value:
    width, s, shared = model.head_width, model.seq_len, model.heads // model.kv_heads
    tape.module = "self_attention.qkv"
    columns = (model.heads + 2 * model.kv_heads) * width
    joined = tape.linear(x, columns, split="columns", bias=model.bias)
    joined = _adapted(tape, model, x, joined)
    tape.module = "self_attention"
    of_head = (BATCH, s, model.kv_heads, (shared + 2) * width)
    parts = tape.split(
        tape.view(joined, of_head, said=(BATCH, s, -1, of_head[-1]), place="S(2)"),
        (shared * width, width, width),
        -1,
    )
    query = tape.view(
        parts[0],
        (BATCH, s, model.heads, width),
        said=(BATCH, s, -1, width),
        target="aten.reshape.default",
    )
    key, value = parts[1:]
    if model.query_key_norm:
        query = _norm(tape, query, model, "self_attention.q_layernorm")
        key = _norm(tape, key, model, "self_attention.k_layernorm")
    if turned:
        tape.module = "self_attention.rotary"
        cos, sin = (tape.unsqueeze(each, 2) for each in turned)
        query, key = (_turned(tape, each, cos, sin) for each in (query, key))
    return _attended(tape, model, query, key, value)


def _crossed(tape: Tape, model: Transformer, x: Value, memory: Value) -> Value:
    """Attention of a decoder's positions to all of an encoder's."""
    heads, width = model.heads, model.head_width
    tape.module = "cross_attention.q"
    query = tape.linear(x, heads * width, split="columns", bias=model.bias)
    tape.module = "cross_attention.kv"
    joined = tape.linear(memory, 2 * heads * width, split="columns", bias=model.bias)
    tape.module = "cross_attention"

    def of_heads(made: Value, width: int) -> Value:
        shape = (*made.shape[:2], heads, width)
        return tape.view(made, shape, said=(*made.shape[:2], -1, width), place="S(2)")

    key, value = tape.split(of_heads(joined, 2 * width), (width, width), -1)
    return _attended(tape, model, of_heads(query, width), key, value, module="cross_attention")


def _turned(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """Rotary positions: each head's halves are turned against each other."""
    half = width_of(x) // 2
    straight = tape.pointwise("aten.mul.Tensor", x, cos)
    first, second = tape.slice(x, 3, 0, half), tape.slice(x, 3, half, LAST)
    crossed = tape.cat((tape.pointwise("aten.neg.default", second), first))
    crossed = tape.pointwise("aten.mul.Tensor", crossed, sin)
    return tape.pointwise("aten.add.Tensor", straight, crossed)


def _attended(
    tape: Tape,
    model: Transformer,
    query: Value,
    key: Value,
    value: Value,
    module: str = "self_attention",
) -> Value:
    """Attention of heads in dim 2, and the product that follows it."""
    s, width = model.seq_len, width_of(value)
    tape.module = f"{module}.core_attention"
    query, key, value = (tape.transpose(each, 1, 2) for each in (query, key, value))
    if model.fused_attention:
        made = tape.call(
            "aten.scaled_dot_product_attention.default",
            query,
            key,
            value,
            None,
            0.1 if model.dropout else 0.0,
            not model.sees_all and module == "self_attention",
            shapes=((*query.shape[:-1], width),),
            places=("S(1)",),
            kwargs=shared_heads(query, key),
        )[0]
    else:
        made = _attended_by_parts(tape, model, query, key, value, module)
    tape.module = module
    made = tape.transpose(made, 1, 2)
    made = tape.call("aten.contiguous.default", made, shapes=(made.shape,), places=(made.place,))[0]
    made = tape.view(made, (BATCH, s, model.heads * width), said=(BATCH, s, -1))
    tape.module = f"{module}.proj"
    return _adapted(tape, model, made, tape.linear(made, model.hidden, split="rows", bias=False))


def _adapted(tape: Tape, model: Transformer, x: Value, made: Value) -> Value:
    """A product of `x` with what its adapter adds, as NeMo's ParallelLinearAdapter has it
    (nemo/collections/nlp/modules/common/megatron/adapters/parallel_adapters.py, 2.0).

    tp ranks share the rows of A, or its columns where they have parts of `x`, and the columns of B.
    With sequence parallelism the adapter gathers its input once more, as its dropout is ahead of
    that. Beside a product that leaves terms of a sum they exchange columns of what is added for
    positions (a2a_experimental) or, without sequence parallelism, gather the columns.
    """
    adapters, module = model.adapters, tape.module
    if adapters is None:
        return made
    is_column = made.place != "P"
    tape.frozen = False
    tape.module = f"{module}.adapter.linear_in"
    if adapters.dropout:
        x = tape.pointwise("aten.dropout.default", x, adapters.dropout, True)
    narrow = tape.linear(x, adapters.rank, split="columns" if is_column else "rows")
    tape.module = f"{module}.adapter.linear_out"
    wide = tape.linear(narrow, width_of(made), split="columns")
    wide = tape.pointwise("aten.mul.Tensor", wide, adapters.alpha / adapters.rank)
    tape.module, tape.frozen = module, True
    takes = () if is_column else (STREAM, STREAM)
    return tape.pointwise("aten.add.Tensor", made, wide, takes=takes)


def _attended_by_parts(
    tape: Tape, model: Transformer, query: Value, key: Value, value: Value, module: str
) -> Value:
    """Scores are written out, masked, turned into weights and summed up."""
    if model.kv_heads != model.heads:
        shared = model.heads // model.kv_heads
        key, value = (_repeated(tape, each, shared) for each in (key, value))
    shape = (*query.shape[:3], key.shape[2])
    scores = tape.call(
        "aten.matmul.default",
        query,
        tape.transpose(key, 2, 3),
        shapes=(shape,),
        places=("S(1)",),
    )[0]
    tape.module = f"{module}.softmax"
    scores = tape.pointwise("aten.mul.Tensor", scores, model.head_width**-0.5)
    if model.wide_softmax:
        scores = tape.cast(scores, "float32")
    weights = tape.pointwise("aten.softmax.int", scores, -1)
    if model.wide_softmax:
        weights = tape.cast(weights, model.dtype)
    weights = _dropped(tape, weights, model, f"{module}.attention_dropout")
    tape.module = f"{module}.core_attention"
    return tape.call(
        "aten.matmul.default",
        weights,
        value,
        shapes=((*query.shape[:-1], width_of(value)),),
        places=("S(1)",),
    )[0]


def _repeated(tape: Tape, x: Value, shared: int) -> Value:
    _, heads, s, width = x.shape
    assert isinstance(heads, int)
    shape = (BATCH, heads, shared, s, width)
    wide = tape.unsqueeze(x, 2, place=x.place)
    wide = tape.call("aten.expand.default", wide, shape, shapes=(shape,), places=(x.place,))[0]
    return tape.view(wide, (BATCH, heads * shared, s, width), target="aten.reshape.default")


def _latent(tape: Tape, model: Transformer, x: Value, turned: tuple[Value, ...]) -> Value:
    """Latent attention: narrow products on every rank, then heads of their own."""
    latent = model.latent
    assert latent is not None
    s, plain, turn, heads = model.seq_len, model.head_width, latent.rope_dim, model.heads
    source = x
    if latent.query_rank:
        tape.module = "self_attention.q_down"
        source = tape.linear(x, latent.query_rank)
        source = _norm(tape, source, model, "self_attention.q_layernorm")
    tape.module = "self_attention.q_up"
    query = tape.linear(source, heads * (plain + turn), split="columns")
    query = tape.view(query, (BATCH, s, heads, plain + turn), said=(BATCH, s, -1, plain + turn))
    tape.module = "self_attention.kv_down"
    narrow = tape.linear(x, latent.key_rank + turn)
    narrow, key_turn = tape.split(narrow, (latent.key_rank, turn), -1)
    narrow = _norm(tape, narrow, model, "self_attention.kv_layernorm")
    tape.module = "self_attention.kv_up"
    wide = tape.linear(narrow, heads * 2 * plain, split="columns")
    wide = tape.view(wide, (BATCH, s, heads, 2 * plain), said=(BATCH, s, -1, 2 * plain))
    key_still, value = tape.split(wide, (plain, plain), -1)
    tape.module = "self_attention.rotary"
    cos, sin = (tape.unsqueeze(each, 2) for each in turned)
    still, moved = tape.split(query, (plain, turn), -1)
    query = tape.cat((still, _turned(tape, moved, cos, sin)))
    shape = (BATCH, s, heads, turn)
    key_turn = _turned(tape, tape.unsqueeze(key_turn, 2), cos, sin)
    key_turn = tape.call("aten.expand.default", key_turn, shape, shapes=(shape,), places=("R",))[0]
    key = tape.cat((key_still, key_turn))
    return _attended(tape, model, query, key, value)


def _feed_forward(tape: Tape, model: Transformer, x: Value, width: int, module: str) -> Value:
    tape.module = f"{module}.fc1"
    if model.gated:
        both = tape.linear(x, 2 * width, split="columns", segments=2, bias=model.bias)
        tape.module = f"{module}.act"
        half = (*x.shape[:-1], width)
        place = f"S({len(x.shape) - 1})"
        gate, up = tape.call(
            "aten.chunk.default", both, 2, -1, shapes=(half, half), places=(place, place)
        )
        made = tape.pointwise("aten.mul.Tensor", tape.pointwise("aten.silu.default", gate), up)
    else:
        wide = tape.linear(x, width, split="columns", bias=model.bias)
        tape.module = f"{module}.act"
        made = tape.pointwise("aten.gelu.default", wide)
    tape.module = f"{module}.fc2"
    return tape.linear(made, width_of(x), split="rows")


def experts_alone(tape: Tape, model: Transformer) -> Value:
    """Write a layer's experts without the layer: router, routed experts and those of all tokens."""
    assert model.experts is not None, f"{model.hidden} wide layers without experts"
    x = tape.input(BATCH, model.seq_len, model.hidden, place=STREAM)
    return _experts(tape, model, model.experts, x)


def _experts(tape: Tape, model: Transformer, experts: Experts, x: Value) -> Value:
    """Tokens are put in the order of their experts, multiplied group by group, and put back.

    Each tp rank routes its own tokens. Where tp cuts the experts' matrices, its ranks multiply all
    their rows, each with a part of every matrix.
    """
    rows, copies = Affine(model.seq_len), Affine(model.seq_len * experts.per_token)
    tape.module = "mlp.router"
    scores = tape.cast(tape.linear(x, experts.number), "float32")
    scores = tape.pointwise("aten.softmax.int", scores, -1)
    shape = (BATCH, model.seq_len, experts.per_token)
    weights, chosen = tape.call(
        "aten.topk.default",
        scores,
        experts.per_token,
        shapes=(shape, shape),
        dtypes=("float32", "int64"),
        places=(STREAM, STREAM),
    )
    tape.module = "mlp.permute"
    flat = tape.view(x, (rows, model.hidden), said=(-1, model.hidden), place=ROWS)
    of_row = (rows, experts.per_token)
    chosen = tape.view(chosen, of_row, said=(-1, experts.per_token), place=ROWS)
    weights = tape.cast(weights, model.dtype)
    weights = tape.view(weights, of_row, said=(-1, experts.per_token), place=ROWS)
    picked, order, ends = tape.call(
        SORT_ROWS,
        flat,
        chosen,
        experts.number,
        shapes=((copies, model.hidden), (copies,), (experts.number,)),
        dtypes=(model.dtype, "int32", "int32"),
        places=(ROWS, ORDER, COUNTS),
    )
    tape.module = "mlp.experts"
    number, width = experts.number, experts.width
    joined = (2 if model.gated else 1) * width
    columns = experts_place("S(1)", ROWS)
    both_columns = experts_place("S(1)x2", ROWS) if model.gated else columns

    def product(x: Value, name: str, width: int, weight_place: str, takes: str, out: str) -> Value:
        weight = tape.param(name, number, width_of(x), width, place=weight_place)
        return tape.call(
            GROUPED_MM,
            x,
            weight,
            ends,
            shapes=((copies, width),),
            takes=(takes, weight_place, experts_place("R", COUNTS)),
            places=(out,),
        )[0]

    def biased(x: Value, name: str, place: str, takes: tuple[str, ...]) -> Value:
        """Rows plus the bias of their expert, in the module whose ops are written."""
        if not experts.bias:
            return x
        bias = tape.param(name, number, width_of(x), place=place)
        takes = (*takes, experts_place("R", COUNTS))
        return tape.call(
            BIAS_OF_RUNS, x, bias, ends, shapes=(x.shape,), takes=takes, places=(x.place,)
        )[0]

    cut = both_columns.partition("|")[0].replace("S(1)", "S(2)")
    made = product(
        picked,
        "fc1",
        joined,
        experts_place(cut, "R"),
        takes=experts_place("R", ROWS),
        out=both_columns,
    )
    tape.module = "mlp.experts.act"
    place = experts_place(both_columns.partition("|")[0], "R")
    made = biased(made, "fc1_bias", place, (both_columns, place))
    if model.gated:
        half = (copies, width)
        gate, up = tape.call(
            "aten.chunk.default", made, 2, -1, shapes=(half, half), places=(columns, columns)
        )
        made = tape.pointwise("aten.mul.Tensor", tape.pointwise("aten.silu.default", gate), up)
    else:
        made = tape.pointwise("aten.gelu.default", made)
    tape.module = "mlp.experts"
    made = product(
        made,
        "fc2",
        model.hidden,
        experts_place("S(1)", "R"),
        takes=columns,
        out=experts_place("P", ROWS),
    )
    tape.module = "mlp.experts.bias"
    terms = experts_place("P", ROWS), experts_place("P", "R")
    made = biased(made, "fc2_bias", "R", terms)
    tape.module = "mlp.unpermute"
    made = tape.call(
        UNSORT_ROWS,
        made,
        order,
        weights,
        experts.per_token,
        shapes=((rows, model.hidden),),
        # Terms of a sum are summed to each rank's own rows.
        takes=(ROWS, ORDER, ROWS),
        places=(ROWS,),
    )[0]
    made = tape.view(made, (BATCH, model.seq_len, model.hidden), place=STREAM)
    if not experts.width_of_shared:
        return made
    shared = _feed_forward(tape, model, x, experts.width_of_shared, "mlp.shared_experts")
    tape.module = "mlp"
    return tape.pointwise("aten.add.Tensor", made, shared, takes=(STREAM, STREAM))
