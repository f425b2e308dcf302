"""A transformer layer, its embedding and its head written down as kernels.

The front end for runs described by a row of numbers instead of a model file. Sizes follow
Megatron: tensor parallelism splits heads, feed-forward and vocabulary; sequence
parallelism splits what lies between; context parallelism splits the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from costmodel.kernels import DeviceRates
from costmodel.stacks import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder: `gated` feed-forwards have three matrices, `kv_heads` may be fewer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    gated: bool
    vocab: int
    seq_len: int

    @property
    def qkv_width(self) -> int:
        """Columns of the joint query, key and value projection."""
        return self.hidden + 2 * self.kv_heads * (self.hidden // self.heads)

    @property
    def layer_params(self) -> int:
        """Matrix parameters of a layer."""
        attention = self.hidden * (self.qkv_width + self.hidden)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, as many as of the output matrix."""
        return self.vocab * self.hidden

    def layer_flop(self) -> float:
        """Model flop of one layer for one sample, forward and backward, full attention."""
        return 6.0 * self.layer_params * self.seq_len + 12.0 * self.seq_len**2 * self.hidden

    def model_flop(self) -> float:
        """Model flop of one sample, forward and backward (recompute not counted)."""
        return self.layers * self.layer_flop() + 6.0 * self.seq_len * self.embedding_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one microbatch lies on the ranks of a stage."""

    micro_batch: int
    tp: int
    cp: int
    sequence_parallel: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Device seconds of a piece of model, forward and backward."""

    forward_s: float
    backward_s: float
    attention_forward_s: float = 0.0


def layer_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Stack
) -> Seconds:
    """Return device seconds of one layer for one microbatch on one rank, without collectives."""
    tokens = split.micro_batch * shape.seq_len // split.cp
    products = [
        (shape.qkv_width // split.tp, shape.hidden),
        (shape.hidden, shape.hidden // split.tp),
        ((2 if shape.gated else 1) * shape.ffn_hidden // split.tp, shape.hidden),
        (shape.hidden, shape.ffn_hidden // split.tp),
    ]
    forward = backward = 0.0
    for n, k in products:
        forward += rates.matmul_seconds(tokens, n, k, dtype=split.dtype)
        backward += rates.matmul_seconds(tokens, k, n, dtype=split.dtype)
        backward += rates.matmul_seconds(n, k, tokens, dtype=split.dtype)
    there, back = _attention_seconds(shape, split, rates, stack)
    forward_bytes, backward_bytes, kernels = _pass_bytes(shape, split, stack)
    return Seconds(
        forward_s=forward + there + rates.pass_seconds(forward_bytes, kernels),
        backward_s=backward + back + rates.pass_seconds(backward_bytes, kernels),
        attention_forward_s=there,
    )


def _attention_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Stack
) -> tuple[float, float]:
    """Scores, softmax and weighted sum; unfused attention writes the score matrix out."""
    heads, head_dim = shape.heads // split.tp, shape.hidden // shape.heads
    batch, s = split.micro_batch, shape.seq_len
    if stack.flash_attention:
        # Causal: half of the scores; under cp each rank has its share of the rows.
        flop = 2.0 * batch * heads * s * s * head_dim / split.cp
        vendor = stack.vendor_attention
        return (
            rates.attention_seconds(flop, vendor=vendor),
            rates.attention_seconds(2.5 * flop, vendor=vendor),
        )
    product = partial(
        rates.matmul_seconds, dtype="float16", batch=batch * heads, aligned=head_dim % 8 == 0
    )
    one, two = product(s, s, head_dim), product(s, head_dim, s)
    scores = batch * heads * s * s
    dropout = 5 if stack.dropout else 0
    # Without the fused kernel: scale, fill the mask, softmax in fp32 and cast back.
    softmax, kernels = (4, 2) if softmax_is_fused(shape, split) else (24, 7)
    forward = one + two + rates.pass_seconds((softmax + dropout) * scores, kernels)
    backward = one + 3 * two + rates.pass_seconds((softmax + 2 + dropout) * scores, kernels)
    return forward, backward


def softmax_is_fused(shape: TransformerShape, split: Split) -> bool:
    """Whether Megatron's fused causal softmax takes these sizes.

    Its thread blocks hold four rows, so it wants batch * local heads divisible by 4, and at
    most 2048 keys (megatron/fused_kernels/scaled_upper_triang_masked_softmax, 2021).
    """
    rows = split.micro_batch * shape.heads // split.tp
    return rows % 4 == 0 and 16 < shape.seq_len <= 2048


def forward_kernels(shape: TransformerShape, split: Split, stack: Stack) -> int:
    """Return how many kernels the host launches for one layer's forward."""
    if stack.flash_attention or softmax_is_fused(shape, split):
        return stack.forward_kernels
    return stack.forward_kernels + 6


def _pass_bytes(shape: TransformerShape, split: Split, stack: Stack) -> tuple[float, float, int]:
    """Bytes of a layer's passes over memory, forward and backward, and their number.

    Norms and residual adds touch hidden-sized rows, split by sequence parallelism; the
    activation function touches feed-forward-sized ones, split by tp. Element: two bytes.
    """
    tokens = split.micro_batch * shape.seq_len / split.cp
    rows = tokens * shape.hidden / (split.tp if split.sequence_parallel else 1)
    norms = 2 * 4 * rows
    residuals = 2 * (7 if stack.dropout else 6) * rows
    activation = (6 if shape.gated else 4) * tokens * shape.ffn_hidden / split.tp
    layout = 4 * tokens * shape.qkv_width / split.tp
    forward = norms + residuals + activation + layout
    backward = 2 * 6 * rows + residuals + 1.7 * activation + layout
    casts = 0.0
    if split.dtype.startswith("float8"):
        # Each operand of the four products is read in 16 bits and written in 8, twice.
        width = 2 * shape.hidden + (shape.hidden + shape.ffn_hidden) / split.tp
        casts = 4 * tokens * width
    factor = stack.pointwise_factor
    return factor * forward + casts, factor * backward + casts, 8


def head_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Stack
) -> Seconds:
    """Return device seconds of the output matrix and the loss.

    An odd vocabulary is taken to be used as it is, so its logits' rows start anywhere; an
    even one to be padded (or printed rounded).
    """
    tokens = split.micro_batch * shape.seq_len // split.cp
    vocab = -(-shape.vocab // split.tp)
    product = partial(rates.matmul_seconds, dtype="bfloat16", aligned=shape.vocab % 2 == 0)
    forward = product(tokens, vocab, shape.hidden)
    backward = product(tokens, shape.hidden, vocab) + product(vocab, shape.hidden, tokens)
    loss = rates.pass_seconds(stack.loss_pass_bytes * tokens * vocab / 2, 5)
    return Seconds(forward_s=forward + loss, backward_s=backward + loss)


def embedding_seconds(
    shape: TransformerShape, split: Split, rates: DeviceRates, stack: Stack
) -> Seconds:
    """Return device seconds of the lookup, and of writing its gradient."""
    tokens = split.micro_batch * shape.seq_len / split.cp
    rows = tokens * shape.hidden
    table = shape.embedding_params / split.tp
    return Seconds(
        forward_s=rates.pass_seconds(8 * rows, 3),
        backward_s=rates.pass_seconds(6 * rows + 2 * stack.gradient_bytes * table, 3),
    )
