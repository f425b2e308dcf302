"""What a transformer is: its sizes, and how its code is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Code = Literal["modules", "huggingface"]
"""How a model's code is written.

- ``modules``: one call where libraries have one: a norm is an op, queries, keys and values are
  one product, attention is told that it is causal and which heads are shared. So Megatron-LM,
  nanotron and other trainers write it.
- ``huggingface``: as the ``transformers`` library does, op for op.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A feed-forward of experts, of which a router picks some for each token."""

    number: int
    """Experts of a layer."""
    per_token: int
    """Experts that a token goes through."""
    width: int
    """Feed-forward width of one."""
    shared: int = 0
    """Experts that every token goes through, besides, as one of so many times the width."""
    shared_width: int = 0
    """Width of what every token goes through besides, where it is no multiple of the width."""
    groups: int = 0
    """Groups that a sigmoid router picks from first (DeepSeek-V3); 0: a softmax over all."""
    dense_layers: int = 0
    """First layers that have an ordinary feed-forward instead."""
    bias: bool = False
    """Their products add biases, one for each expert."""

    @property
    def width_of_shared(self) -> int:
        """Width of what every token goes through besides; 0 where there is nothing."""
        return self.shared_width or self.shared * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and values are made
    from a narrow vector, queries from another.
    """

    query_rank: int
    """Width of what queries are made from; 0: from the whole."""
    key_rank: int
    """Width of what keys and values are made from."""
    rope_dim: int
    """Entries of a query's or key's head that are turned by their position, besides the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Layers that see all of a sequence of their own, and whose result a decoder's layers attend to
    (T5: Raffel et al. 2019, arXiv 1910.10683); as wide as the decoder's, with its embedding.
    """

    layers: int
    """Number of layers."""
    seq_len: int
    """Tokens of its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) beside the attention's products with
    weights, with all other weights frozen: x W^T + alpha / rank * dropout(x) A^T B^T.
    """

    rank: int
    """Rows of A, columns of B."""
    alpha: float = 32.0
    """Factor of what they add, times the rank."""
    dropout: float = 0.1
    """Part of their inputs' entries that is dropped out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of equal layers between an embedding and a head."""

    layers: int
    """Number of layers."""
    hidden: int
    """Width of what goes from layer to layer."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values, each shared by as many query heads."""
    ffn_hidden: int
    """Width of a feed-forward."""
    vocab: int
    """Entries of the vocabulary."""
    seq_len: int
    """Tokens of a sample."""
    head_dim: int = 0
    """Width of a head (with `latent`, of its part that is not turned, and of values); 0: hidden /
    heads."""
    gated: bool = True
    """The feed-forward has three matrices (SwiGLU), not two (GELU)."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of norm."""
    epsilon: float = 1e-6
    """What norms add to the mean square."""
    query_key_norm: bool = False
    """Heads of queries and keys are normed (Qwen3)."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """Queries and keys are turned; or a table is added to the embedding."""
    max_positions: int = 0
    """Rows of that table; 0: `seq_len`."""
    bias: bool = False
    """Products add a bias."""
    dropout: bool = False
    """What each half of a layer adds is dropped out first, and the attention's weights."""
    tied: bool = False
    """The head's matrix is the embedding's."""
    ahead: int = 0
    """Tokens after the next that are predicted too (DeepSeek-AI 2024, arXiv 2412.19437, section
    2.2): each by a layer more, and by the head again (of `modules` code)."""
    sees_all: bool = False
    """Each position attends to all, not to those before it alone (BERT)."""
    transforms_head: bool = False
    """Ahead of the vocabulary the stream goes through a product, GELU and a norm (BERT: Devlin et
    al. 2018, arXiv 1810.04805; of `modules` code)."""
    encoder: Encoder | None = None
    """What the layers attend to besides (of `modules` code)."""
    fused_attention: bool = True
    """Attention is one kernel; else its scores are written out (until about 2022)."""
    wide_softmax: bool = False
    """Scores that are written out are cast to fp32 ahead of their softmax, and its result back, by
    ops of their own."""
    latent: Latent | None = None
    """Latent attention."""
    experts: Experts | None = None
    """A feed-forward of experts."""
    adapters: Adapters | None = None
    """Adapters alone are trained (of `modules` code)."""
    dtype: str = "bfloat16"
    """Dtype of parameters and activations."""
    code: Code = "modules"
    """How its code is written."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads
