"""The sizes of a row's model: as its columns say, as a well-known model has them, or usual ones."""

from __future__ import annotations

import re
from typing import Literal

from costmodel.execution import Execution
from costmodel.table.rows.named_models import (
    NamedModel,
    model_of_size,
    named_model,
    params_in_name,
)
from costmodel.table.rows.row_stack import seq_len_of
from costmodel.table.rows.row_words import Cells, RowError, gated_of, real
from planner.language.templates import Encoder, Experts, Latent, Transformer

ACTIVE_PARAMS = re.compile(r"\d[bB]-?[aA]\d+(\.\d+)?[bB]")
"""A name such as ``80B-A3B`` says that few of its parameters see a token: its size alone tells
nothing of its layers."""

LEAST_PARAMS, MOST_PARAMS = 1e6, 1e14
"""Parameters of a model that is known only by their number."""


def check_divides(name: str, part: int, of: str, whole: int) -> None:
    """Raise RowError where a number does not divide another."""
    if whole % part:
        raise RowError(f"{name}={part} does not divide {of}={whole}")


def sizes_of_row(cells: Cells, stack: Execution) -> Transformer:
    """Return the sizes of a row's model; raise RowError where they are not told or are odd."""
    known = named_model(cells.text("model"))

    def usual(name: str, otherwise: int | None) -> int | None:
        return otherwise if known is None else getattr(known, name)

    layers, hidden = cells.given("layers"), cells.given("hidden")
    num_experts = cells.given("num_experts", least=0) or 1
    if known is not None and (hidden is None or hidden == known.hidden):
        num_experts = max(num_experts, known.num_experts)
    else:
        known = None
    ep = cells.given("ep", least=0) or 1
    if ep > 1 and num_experts == 1:
        num_experts = cells.assume("num_experts", max(8, ep))
    params = real(cells.text("params_b").lower().removesuffix("b"))
    params = 1e9 * params if params else params_in_name(cells.text("model"))
    if known is None and hidden is None and ACTIVE_PARAMS.search(cells.text("model")):
        raise RowError(
            f"model {cells.text('model')!r} is not one we have the sizes of; give layers, hidden, "
            "num_experts and experts_per_token"
        )
    if known is None and hidden is None and params:
        if not LEAST_PARAMS <= params <= MOST_PARAMS:
            raise RowError(f"a model of {params:.3g} parameters is not priced")
        layers, hidden = model_of_size(params)
        cells.assume("layers", layers)
        cells.assume("hidden", hidden)
    hidden = cells.number("hidden", usual("hidden", None)) if hidden is None else hidden
    layers = cells.number("layers", usual("layers", None)) if layers is None else layers
    tp = cells.given("tp") or 1
    heads = cells.number("heads", usual("heads", tp * max(1, round(hidden / 128 / tp))))
    kv_heads = cells.number("kv_heads", usual("kv_heads", heads))
    check_divides("kv_heads", kv_heads, "heads", heads)
    is_moe = num_experts > 1
    if is_moe and known is not None:
        # The column holds the width of dense layers, where there are any.
        ffn_hidden = known.ffn_hidden
    else:
        ffn_hidden = cells.number("ffn_hidden", usual("ffn_hidden", 4 * hidden))
    gated = gated_of(cells.text("gated_ffn"))
    if gated is None:
        gated = bool(cells.assume("gated_ffn", usual("gated_ffn", 0)))
    picked = cells.number("experts_per_token", usual("experts_per_token", 2)) if is_moe else 1
    if picked > num_experts:
        raise RowError(f"experts_per_token={picked} is more than num_experts={num_experts}")
    tied = cells.given("tied", least=0)
    key_rank = _part(cells, "key_rank", usual("key_rank", 0))
    dense = 0 if known is None else _dense_layers(known, layers)
    head_dim = cells.given("head_dim", least=0) or usual("head_dim", 0)
    rope_dim = _part(cells, "rope_dim", usual("rope_dim", 0))
    bias = bool(_part(cells, "bias", known.bias if known and gated else int(not gated)))
    experts = Experts(
        number=num_experts,
        per_token=picked,
        width=ffn_hidden,
        shared=usual("shared_experts", 0) or 0,
        shared_width=_part(cells, "shared_width", 0),
        dense_layers=_part(cells, "dense_layers", dense),
        bias=bias,
    )
    latent = Latent(
        query_rank=_part(cells, "query_rank", usual("query_rank", 0)),
        key_rank=key_rank,
        rope_dim=rope_dim,
    )
    dense_ffn = _part(cells, "dense_ffn", usual("dense_ffn", 0))
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=dense_ffn or ffn_hidden,
        gated=gated,
        vocab=cells.number("vocab", usual("vocab", 51200)),
        seq_len=seq_len_of(cells) or cells.assume("seq_len", stack.seq_len),
        head_dim=head_dim or max(1, hidden // heads),
        experts=experts if is_moe else None,
        latent=latent if key_rank else None,
        ahead=cells.given("mtp_layers", least=0) or 0,
        tied=not gated if tied is None else bool(tied),
        norm=_norm(cells, gated=gated),
        positions="rotary" if key_rank else _positions(cells, gated=gated),
        max_positions=_part(cells, "max_positions", 0),
        bias=bias,
        query_key_norm=bool(_part(cells, "qk_norm", known.qk_norm if known else 0)),
        sees_all=bool(_part(cells, "sees_all", 0)),
        transforms_head=bool(_part(cells, "transforms_head", 0)),
        encoder=_encoder(cells),
        wide_softmax=bool(_part(cells, "wide_softmax", 0)),
    )


def _part(cells: Cells, name: str, usual: int | None) -> int:
    """Return what a column says of a part that models may lack, or what they usually have of it."""
    given = cells.given(name, least=0)
    return (usual or 0) if given is None else given


def _encoder(cells: Cells) -> Encoder | None:
    layers = cells.given("encoder_layers", least=0)
    if not layers:
        return None
    seq_len = cells.number("encoder_seq_len", seq_len_of(cells))
    return Encoder(layers=layers, seq_len=seq_len)


def _norm(cells: Cells, *, gated: bool) -> Literal["rms", "layer"]:
    named = cells.text("norm").lower()
    if named and not re.search(r"rms|layer|\bln\b", named):
        raise RowError(f"norm {named!r} is not priced; use rms or layer")
    return "rms" if ("rms" in named if named else gated) else "layer"


def _positions(cells: Cells, *, gated: bool) -> Literal["rotary", "learned", "none"]:
    named = cells.raw("positions").lower()
    if re.search(r"rope|rotary|yarn", named):
        return "rotary"
    if re.search(r"learned|absolute", named):
        return "learned"
    if named == "none":
        return "none"
    if not named:
        return "rotary" if gated else "learned"
    raise RowError(f"positions {named!r} are not priced; use rotary, learned or none")


def _dense_layers(known: NamedModel, layers: int) -> int:
    """Return the first layers without experts; of a shortened model as large a part, at least 1."""
    if layers >= known.layers or not known.dense_layers:
        return known.dense_layers
    return max(1, round(known.dense_layers * layers / known.layers))
