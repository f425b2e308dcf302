"""Parameters and model flop that follow from a decoder's sizes: those that authors state.

They take the first dense layers of a model with experts to be as wide as the experts of a token, as
they nearly are. Latent attention: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.language.templates import Transformer


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Matrix parameters, and flop of model ops, forward and backward."""

    sizes: Transformer

    @property
    def _rope_dim(self) -> int:
        """By how much keys are wider than values."""
        return 0 if self.sizes.latent is None else self.sizes.latent.rope_dim

    @property
    def ffn_width(self) -> int:
        """Width of a feed-forward; with experts, of a single expert."""
        return self.sizes.ffn_hidden if self.sizes.experts is None else self.sizes.experts.width

    @property
    def score_width(self) -> float:
        """Columns of a key and of a value of all heads, their mean."""
        return self.sizes.heads * (self.sizes.head_width + self._rope_dim / 2)

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Columns and inner length of attention's products."""
        sizes, latent = self.sizes, self.sizes.latent
        width = sizes.heads * sizes.head_width
        out = (sizes.hidden, width)
        if latent is None:
            return [(width + 2 * sizes.kv_heads * sizes.head_width, sizes.hidden), out]
        keys = sizes.heads * (sizes.head_width + latent.rope_dim)
        return [
            (latent.query_rank + latent.key_rank + latent.rope_dim, sizes.hidden),
            (keys, latent.query_rank or sizes.hidden),
            (2 * width, latent.key_rank),
            out,
        ]

    @property
    def shared_parts(self) -> float:
        """What sees every token, in widths of an expert."""
        experts = self.sizes.experts
        return 0.0 if experts is None else experts.width_of_shared / experts.width

    @property
    def attention_params(self) -> int:
        """Matrix parameters of a layer's attention."""
        return sum(columns * inner for columns, inner in self.attention_matrices)

    @property
    def expert_params(self) -> int:
        """Matrix parameters of one feed-forward."""
        return (3 if self.sizes.gated else 2) * self.sizes.hidden * self.ffn_width

    @property
    def used_params(self) -> float:
        """Matrix parameters of a layer that one token is multiplied with."""
        picked = 1 if self.sizes.experts is None else self.sizes.experts.per_token
        return self.attention_params + (picked + self.shared_parts) * self.expert_params

    @property
    def layer_params(self) -> float:
        """Matrix parameters of a layer."""
        number = 1 if self.sizes.experts is None else self.sizes.experts.number
        return self.attention_params + (number + self.shared_parts) * self.expert_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, as many as of the output matrix."""
        return self.sizes.vocab * self.sizes.hidden

    @property
    def num_params(self) -> float:
        """Matrix parameters of the model, the embedding counted once."""
        return self.sizes.layers * self.layer_params + self.embedding_params

    def layer_flop(self, *, causal: bool = False) -> float:
        """Model flop of one layer for one sample, forward and backward; attention in full, or only
        that of positions that see each other (`causal`).
        """
        # Two products of 2 flop a multiply-add (scores, and their sum of values), three times with
        # the backward: 12. Parameters: 2 flop, three times: 6.
        scores = 12.0 * self.sizes.seq_len**2 * self.score_width
        return 6.0 * self.used_params * self.sizes.seq_len + (scores / 2 if causal else scores)

    def model_flop(self, *, causal: bool = False) -> float:
        """Model flop of one sample, forward and backward (recompute not counted)."""
        sizes = self.sizes
        head = 6.0 * sizes.seq_len * self.embedding_params
        # A layer that predicts ahead first joins two vectors: a product from 2 hidden to hidden.
        joins = 12.0 * sizes.seq_len * sizes.hidden**2
        layer = self.layer_flop(causal=causal)
        return sizes.layers * layer + head + sizes.ahead * (layer + head + joins)
