"""A transformer layer, its embedding and its head written down as kernels.

The front end for runs described by a row of numbers instead of a model file. Sizes follow
Megatron: tensor parallelism splits heads, feed-forward and vocabulary; sequence
parallelism splits what lies between; context parallelism splits the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from costmodel.execution import Execution
from costmodel.table.kernels import DeviceRates

ROUTER_KERNELS = 20
"""Launches of a router, and of putting tokens in the order of their experts and back."""

EXPERT_KERNELS = 2
"""Launches of each expert on a rank: its products are kernels of their own."""


BUSIEST_RANK = 1.1
"""Tokens of the rank whose experts got most over the mean, for which all others wait: routers are
taught to pick evenly and nearly do. Chosen from published runs, whose bias it halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder: `gated` feed-forwards have three matrices, `kv_heads` may be fewer.

    `head_dim` 0 means hidden / heads. With `num_experts`, each layer's feed-forward is that many
    of which the router picks `experts_per_token`, beside `shared_experts` that see every token;
    `ffn_hidden` is the width of one.

    With `key_rank`, attention is latent (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and
    values are made from so many columns, queries from `query_rank` (0: from all), and keys are
    `rope_dim` wider than values.

    The first `dense_layers` of a model with experts have a feed-forward of width `dense_ffn`; the
    closed forms take them to be as wide as the experts of a token, as they nearly are.
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

    def attention_matrices(self, tp: int = 1) -> list[tuple[int, int]]:
        """Return columns and inner length of attention's products on one of `tp` ranks."""
        out = (self.hidden, self.attention_width // tp)
        if not self.key_rank:
            return [(self.qkv_width // tp, self.hidden), out]
        keys = self.heads * (self.head_width + self.rope_dim) // tp
        return [
            (self.query_rank + self.key_rank + self.rope_dim, self.hidden),
            (keys, self.query_rank or self.hidden),
            (2 * self.attention_width // tp, self.key_rank),
            out,
        ]

    @property
    def used_experts(self) -> int:
        """Feed-forwards that one token goes through."""
        return self.experts_per_token + self.shared_experts

    @property
    def attention_params(self) -> int:
        """Matrix parameters of a layer's attention."""
        return sum(columns * inner for columns, inner in self.attention_matrices())

    @property
    def expert_params(self) -> int:
        """Matrix parameters of one feed-forward."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def used_params(self) -> int:
        """Matrix parameters of a layer that one token is multiplied with."""
        return self.attention_params + self.used_experts * self.expert_params

    def held_params(self, ep: int = 1) -> float:
        """Return matrix parameters of a layer on each of `ep` ranks that share its experts."""
        experts = self.num_experts / ep + self.shared_experts
        return self.attention_params + experts * self.expert_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, as many as of the output matrix."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> float:
        """Matrix parameters of the model, the embedding counted once."""
        return self.layers * self.held_params() + self.embedding_params

    def layer_flop(self) -> float:
        """Model flop of one layer for one sample, forward and backward, full attention."""
        scores = 12.0 * self.seq_len**2 * self.score_width
        return 6.0 * self.used_params * self.seq_len + scores

    def model_flop(self) -> float:
        """Model flop of one sample, forward and backward (recompute not counted)."""
        return self.layers * self.layer_flop() + 6.0 * self.seq_len * self.embedding_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one microbatch lies on the ranks of a stage; `ep` ranks share the experts."""

    micro_batch: int
    tp: int
    cp: int
    sequence_parallel: bool
    dtype: str
    ep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Device seconds of a piece of model, forward and backward."""

    forward_s: float
    backward_s: float
    attention_forward_s: float = 0.0


def layer_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Execution
) -> Seconds:
    """Return device seconds of one layer for one microbatch on one rank, without collectives."""
    tokens = split.micro_batch * shape.seq_len // split.cp
    # Rows, columns, inner length and number of like products.
    products = [
        *((tokens, columns, inner, 1) for columns, inner in shape.attention_matrices(split.tp)),
        *_feed_forward_products(shape, split, tokens),
    ]
    forward = backward = 0.0
    product = partial(rates.matmul_seconds, dtype=split.dtype)
    for m, n, k, batch in products:
        forward += product(m, n, k, batch=batch)
        backward += product(m, k, n, batch=batch) + product(n, k, m, batch=batch)
    there, back = _attention_seconds(shape, split, rates, stack)
    forward_bytes, backward_bytes, kernels = _pass_bytes(shape, split, stack)
    # Weight gradients are added to those of the microbatches before.
    backward_bytes += stack.accumulate_bytes * shape.held_params(split.ep) / split.tp
    return Seconds(
        forward_s=forward + there + rates.pass_seconds(forward_bytes, kernels),
        backward_s=backward + back + rates.pass_seconds(backward_bytes, kernels),
        attention_forward_s=there,
    )


def _feed_forward_products(
    shape: TransformerShape, split: Split, tokens: int
) -> list[tuple[int, int, int, int]]:
    """Products of the feed-forward; of experts, those of the rank that got most tokens."""
    wide = (2 if shape.gated else 1) * shape.ffn_hidden // split.tp
    narrow = shape.ffn_hidden // split.tp
    if shape.num_experts == 1:
        return [(tokens, wide, shape.hidden, 1), (tokens, shape.hidden, narrow, 1)]
    local = max(1, shape.num_experts // split.ep)
    rows = max(1, round(BUSIEST_RANK * tokens * shape.experts_per_token / local))
    both = [(rows, wide, shape.hidden, local), (rows, shape.hidden, narrow, local)]
    if shape.shared_experts:
        both.append((tokens, shape.shared_experts * wide, shape.hidden, 1))
        both.append((tokens, shape.hidden, shape.shared_experts * narrow, 1))
    return both


def _attention_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Execution
) -> tuple[float, float]:
    """Scores, softmax and weighted sum; unfused attention writes the score matrix out."""
    heads, head_dim = shape.heads // split.tp, shape.head_width
    batch, s = split.micro_batch, shape.seq_len
    if stack.flash_attention:
        # Causal: half of the scores; under cp each rank has its share of the rows.
        flop = 2.0 * batch * s * s * shape.score_width / split.tp / split.cp
        vendor = stack.vendor_attention
        return (
            rates.attention_seconds(flop, vendor=vendor),
            rates.attention_seconds(2.5 * flop, vendor=vendor),
        )
    product = partial(rates.matmul_seconds, dtype="float16", batch=batch * heads)
    scores_s, values_s = product(s, s, head_dim), product(s, head_dim, s)
    scores = batch * heads * s * s
    dropout = 5 if stack.dropout else 0
    # The fused kernel reads the half below the diagonal and writes all. Without it: scale,
    # fill the mask, softmax in fp32 and cast back.
    fused = softmax_is_fused(shape, split)
    there, back, kernels = (3, 4, 2) if fused else (24, 26, 7)
    forward = scores_s + values_s + rates.pass_seconds((there + dropout) * scores, kernels)
    backward = scores_s + 3 * values_s + rates.pass_seconds((back + dropout) * scores, kernels)
    return forward, backward


def softmax_is_fused(shape: TransformerShape, split: Split) -> bool:
    """Whether Megatron's fused causal softmax takes these sizes.

    Its thread blocks hold four rows, so it wants batch * local heads divisible by 4, and at
    most 2048 keys (megatron/fused_kernels/scaled_upper_triang_masked_softmax, 2021).
    """
    rows = split.micro_batch * shape.heads // split.tp
    return rows % 4 == 0 and 16 < shape.seq_len <= 2048


def forward_kernels(shape: TransformerShape, split: Split, stack: Execution) -> int:
    """Return how many kernels the host launches for one layer's forward."""
    kernels = stack.forward_kernels
    if not stack.flash_attention and not softmax_is_fused(shape, split):
        kernels += 6
    if shape.num_experts > 1:
        kernels += ROUTER_KERNELS + EXPERT_KERNELS * max(1, shape.num_experts // split.ep)
    return kernels


def _pass_bytes(
    shape: TransformerShape, split: Split, stack: Execution
) -> tuple[float, float, int]:
    """Bytes of a layer's passes over memory, forward and backward, and their number.

    Norms and residual adds touch hidden-sized rows, split by sequence parallelism; the
    activation function touches feed-forward-sized ones, split by tp. Element: two bytes.
    """
    tokens = split.micro_batch * shape.seq_len / split.cp
    rows = tokens * shape.hidden / (split.tp if split.sequence_parallel else 1)
    norms = 2 * 4 * rows
    residuals = 2 * (7 if stack.dropout else 6) * rows
    used = shape.used_experts * shape.ffn_hidden
    activation = (6 if shape.gated else 4) * tokens * used / split.tp
    # Queries and keys are turned by their positions; without, heads are read where they lie.
    turned = shape.qkv_width if shape.gated else 0
    layout = 4 * tokens * (shape.attention_width + turned) / split.tp
    if shape.num_experts > 1:
        # Rows are put in the order of their experts, and back, and weighted.
        layout += 2 * 5 * rows * shape.experts_per_token
    forward = norms + residuals + activation + layout
    joined = 4 * tokens * shape.qkv_width / split.tp
    backward = 2 * 6 * rows + residuals + 1.7 * activation + layout + joined
    casts = 0.0
    if split.dtype.startswith(("float8", "float4")):
        # Each operand of the four products is read in 16 bits and written in 8, twice; a token's
        # once for each of its experts.
        copies = 1 + shape.experts_per_token
        width = copies * shape.hidden + (shape.attention_width + used) / split.tp
        casts = 4 * tokens * width
    factor = stack.pointwise_factor
    return factor * forward + casts, factor * backward + casts, 8


def head_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Execution
) -> Seconds:
    """Return device seconds of the output matrix and the loss.

    A vocabulary that tp splits is taken to be padded; of one that it does not, rows of logits
    are aligned or not as the number is.
    """
    tokens = split.micro_batch * shape.seq_len // split.cp
    vocab = -(-shape.vocab // split.tp)
    aligned = split.tp > 1 or shape.vocab % 8 == 0
    product = partial(rates.matmul_seconds, dtype="bfloat16", aligned=aligned)
    forward = product(tokens, vocab, shape.hidden)
    backward = product(tokens, shape.hidden, vocab) + product(vocab, shape.hidden, tokens)
    loss = rates.pass_seconds(stack.loss_pass_bytes * tokens * vocab / 2, 5)
    return Seconds(forward_s=forward + loss, backward_s=backward + loss)


def embedding_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Execution
) -> Seconds:
    """Return device seconds of the lookup, and of writing its gradient."""
    tokens = split.micro_batch * shape.seq_len / split.cp
    rows = tokens * shape.hidden
    table = shape.embedding_params / split.tp
    return Seconds(
        forward_s=rates.pass_seconds(8 * rows, 3),
        backward_s=rates.pass_seconds(6 * rows + 2 * stack.gradient_bytes * table, 3),
    )
