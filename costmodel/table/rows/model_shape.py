"""The sizes of a transformer as rows state them, and what follows: parameters and model flop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder: `gated` feed-forwards have three matrices, `kv_heads` may be fewer.

    `head_dim` 0 means hidden / heads. With `num_experts`, each layer's feed-forward is that many
    of which the router picks `experts_per_token`, beside `shared_experts` that see every token;
    `ffn_hidden` is the width of one.

    With `key_rank`, attention is latent (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and
    values are made from so many columns, queries from `query_rank` (0: from all), and keys are
    `rope_dim` wider than values.

    The first `dense_layers` of a model with experts have a feed-forward of width `dense_ffn`;
    counts of parameters and flop take them to be as wide as the experts of a token, as they
    nearly are.

    `ahead` tokens after the next are predicted too, each by a layer more and the head again.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    gated: bool
    vocab: int
    seq_len: int
    head_dim: int = 0
    num_experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    ahead: int = 0

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
    def used_experts(self) -> int:
        """Feed-forwards that one token goes through."""
        return self.experts_per_token + self.shared_experts

    @property
    def attention_params(self) -> int:
        """Matrix parameters of a layer's attention."""
        return sum(columns * inner for columns, inner in self.attention_matrices)

    @property
    def expert_params(self) -> int:
        """Matrix parameters of one feed-forward."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def used_params(self) -> int:
        """Matrix parameters of a layer that one token is multiplied with."""
        return self.attention_params + self.used_experts * self.expert_params

    @property
    def layer_params(self) -> int:
        """Matrix parameters of a layer."""
        experts = self.num_experts + self.shared_experts
        return self.attention_params + experts * self.expert_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, as many as of the output matrix."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """Matrix parameters of the model, the embedding counted once."""
        return self.layers * self.layer_params + self.embedding_params

    def layer_flop(self, *, causal: bool = False) -> float:
        """Model flop of one layer for one sample, forward and backward; attention in full, or only
        that of positions that see each other (`causal`).
        """
        scores = 12.0 * self.seq_len**2 * self.score_width
        return 6.0 * self.used_params * self.seq_len + (scores / 2 if causal else scores)

    def model_flop(self, *, causal: bool = False) -> float:
        """Model flop of one sample, forward and backward (recompute not counted)."""
        head = 6.0 * self.seq_len * self.embedding_params
        joins = 12.0 * self.seq_len * self.hidden**2
        layer = self.layer_flop(causal=causal)
        return self.layers * layer + head + self.ahead * (layer + head + joins)
