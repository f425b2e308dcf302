"""The sizes of a row's model: as its columns say, as a well-known model has them, or usual ones.

What follows from them: parameters and model flop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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

ACTIVE_PARAMS = re.compile(r"\d[bB]-?[aA]\d+(\.\d+)?[bB]")
"""A name such as ``80B-A3B`` says that few of its parameters see a token: its size alone tells
nothing of its layers."""

LEAST_PARAMS, MOST_PARAMS = 1e6, 1e14
"""Parameters of a model that is known only by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder.

    Counts of parameters and flop take `dense_layers` to be as wide as the experts of a token, as
    they nearly are. Latent attention: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
    """

    layers: int
    """Layers, those that predict ahead apart."""
    hidden: int
    """Columns of what goes from layer to layer."""
    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values, which may be fewer."""
    ffn_hidden: int
    """Width of a feed-forward; with experts, of a single expert."""
    gated: bool
    """Whether feed-forwards have three matrices, not two."""
    vocab: int
    """Tokens of the vocabulary."""
    seq_len: int
    """Tokens of a sample."""
    head_dim: int = 0
    """Width of a head; 0: hidden / heads."""
    num_experts: int = 1
    """Experts of a layer's feed-forward; 1: it has none."""
    experts_per_token: int = 1
    """Experts that the router picks for a token."""
    shared_experts: int = 0
    """Experts beside these that see every token."""
    shared_width: int = 0
    """Their width together, where it is no multiple of an expert's; 0: it is."""
    query_rank: int = 0
    """With latent attention, columns that queries are made from; 0: from all."""
    key_rank: int = 0
    """Columns that keys and values are made from; 0: attention is not latent."""
    rope_dim: int = 0
    """By how much keys are wider than values."""
    dense_layers: int = 0
    """First layers of a model with experts that have an ordinary feed-forward."""
    dense_ffn: int = 0
    """Its width."""
    ahead: int = 0
    """Tokens after the next that are predicted too, each by a layer more and the head again."""
    tied: bool = False
    """Whether the output matrix is the token embedding's."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of norm."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """Queries and keys are turned; or a table is added to the embedding."""
    max_positions: int = 0
    """Rows of that table; 0: `seq_len`."""
    bias: bool = False
    """Whether products add a bias."""
    query_key_norm: bool = False
    """Whether heads of queries and keys are normed."""

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of the queries, and of what attention gives."""
        return self.heads * self.head_width

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values together."""
        turned = 2 * self.heads * self.rope_dim
        return self.attention_width + 2 * self.kv_heads * self.head_width + turned

    @property
    def score_width(self) -> float:
        """Columns of a key and of a value of all heads, their mean."""
        return self.heads * (self.head_width + self.rope_dim / 2)

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Columns and inner length of attention's products."""
        out = (self.hidden, self.attention_width)
        if not self.key_rank:
            return [(self.qkv_width, self.hidden), out]
        keys = self.heads * (self.head_width + self.rope_dim)
        return [
            (self.query_rank + self.key_rank + self.rope_dim, self.hidden),
            (keys, self.query_rank or self.hidden),
            (2 * self.attention_width, self.key_rank),
            out,
        ]

    @property
    def shared_parts(self) -> float:
        """What sees every token, in widths of an expert."""
        return self.shared_width / self.ffn_hidden if self.shared_width else self.shared_experts

    @property
    def used_experts(self) -> float:
        """Feed-forwards that one token goes through."""
        return self.experts_per_token + self.shared_parts

    @property
    def attention_params(self) -> int:
        """Matrix parameters of a layer's attention."""
        return sum(columns * inner for columns, inner in self.attention_matrices)

    @property
    def expert_params(self) -> int:
        """Matrix parameters of one feed-forward."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def used_params(self) -> float:
        """Matrix parameters of a layer that one token is multiplied with."""
        return self.attention_params + self.used_experts * self.expert_params

    @property
    def layer_params(self) -> float:
        """Matrix parameters of a layer."""
        experts = self.num_experts + self.shared_parts
        return self.attention_params + experts * self.expert_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, as many as of the output matrix."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> float:
        """Matrix parameters of the model, the embedding counted once."""
        return self.layers * self.layer_params + self.embedding_params

    def layer_flop(self, *, causal: bool = False) -> float:
        """Model flop of one layer for one sample, forward and backward; attention in full, or only
        that of positions that see each other (`causal`).
        """
        # Two products of 2 flop a multiply-add (scores, and their sum of values), three times with
        # the backward: 12. Parameters: 2 flop, three times: 6.
        scores = 12.0 * self.seq_len**2 * self.score_width
        return 6.0 * self.used_params * self.seq_len + (scores / 2 if causal else scores)

    def model_flop(self, *, causal: bool = False) -> float:
        """Model flop of one sample, forward and backward (recompute not counted)."""
        head = 6.0 * self.seq_len * self.embedding_params
        # A layer that predicts ahead first joins two vectors: a product from 2 hidden to hidden.
        joins = 12.0 * self.seq_len * self.hidden**2
        layer = self.layer_flop(causal=causal)
        return self.layers * layer + head + self.ahead * (layer + head + joins)


def check_divides(name: str, part: int, of: str, whole: int) -> None:
    """Raise RowError where a number does not divide another."""
    if whole % part:
        raise RowError(f"{name}={part} does not divide {of}={whole}")


def shape_of_row(cells: Cells, stack: Execution) -> TransformerShape:
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
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        gated=gated,
        vocab=cells.number("vocab", usual("vocab", 51200)),
        seq_len=seq_len_of(cells) or cells.assume("seq_len", stack.seq_len),
        head_dim=head_dim or max(1, hidden // heads),
        num_experts=num_experts,
        experts_per_token=picked,
        shared_experts=(usual("shared_experts", 0) or 0) if is_moe else 0,
        shared_width=_part(cells, "shared_width", 0) if is_moe else 0,
        query_rank=_part(cells, "query_rank", usual("query_rank", 0)),
        key_rank=key_rank,
        rope_dim=_part(cells, "rope_dim", usual("rope_dim", 0)),
        dense_layers=_part(cells, "dense_layers", dense),
        dense_ffn=_part(cells, "dense_ffn", usual("dense_ffn", 0)),
        ahead=cells.given("mtp_layers", least=0) or 0,
        tied=not gated if tied is None else bool(tied),
        norm=_norm(cells, gated=gated),
        positions="rotary" if key_rank else _positions(cells, gated=gated),
        max_positions=_part(cells, "max_positions", 0),
        bias=bool(_part(cells, "bias", int(not gated))),
        query_key_norm=bool(_part(cells, "qk_norm", 0)),
    )


def _part(cells: Cells, name: str, usual: int | None) -> int:
    """Return what a column says of a part that models may lack, or what they usually have of it."""
    given = cells.given(name, least=0)
    return (usual or 0) if given is None else given


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
