"""Memory of a run described by a row: Megatron's activation formula, by parts.

For a standard layer in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198, section 4) one
microbatch keeps s*b*h*(10 + 24/t + 5*a*s/(h*t)) bytes, all divided by t with sequence
parallelism; gated feed-forwards, fewer key-value heads, flash attention and runs without
dropout keep other parts, so the terms are counted one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.execution import Execution
from costmodel.table.transformer import Split, TransformerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Bytes of the rank that needs most, in parts."""

    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    activation_bytes: float
    transient_bytes: float

    @property
    def total(self) -> float:
        """Bytes of live tensors at the peak."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.state_bytes
            + self.activation_bytes
            + self.transient_bytes
        )


def layer_activation_bytes(
    shape: TransformerShape, split: Split, stack: Execution, *, recompute: str = "none"
) -> float:
    """Return what one layer keeps for one microbatch on one rank, elements of two bytes."""
    tokens = split.micro_batch * shape.seq_len / split.cp
    whole = 1 / split.tp if split.sequence_parallel else 1.0
    h = shape.hidden
    if recompute == "full":
        return 2 * tokens * h * whole
    norms = 4 * tokens * h * whole
    products_in = 4 * tokens * h * whole
    masks = 2 * tokens * h * whole if stack.dropout else 0.0
    attention = 2 * tokens * (shape.qkv_width + shape.attention_width) / split.tp
    used = shape.used_experts * shape.ffn_hidden
    feed_forward = 2 * tokens * used * (3 if shape.gated else 2) / split.tp
    if shape.num_experts > 1:
        # Rows in the order of their experts, before and after.
        feed_forward += 4 * tokens * shape.experts_per_token * h * whole
    total = norms + products_in + masks + attention + feed_forward
    if not stack.flash_attention and recompute != "selective":
        # Softmax output, and with dropout its mask and result.
        per_score = 5 if stack.dropout else 2
        total += per_score * split.micro_batch * shape.heads / split.tp * shape.seq_len**2
    return total


def layers_in_flight(
    *, schedule: str, layers: int, pp: int, vpp: int, num_microbatches: int
) -> float:
    """Return how many (layer, microbatch) pairs the first pp rank keeps at most."""
    per_rank = layers / pp
    if schedule in ("fthenb", "gpipe"):
        return per_rank * num_microbatches
    if schedule == "zb-2p":
        return per_rank * min(num_microbatches, 2 * pp - 1)
    if vpp > 1 and not schedule.startswith("zb"):
        chunks = min(2 * (pp - 1) + (vpp - 1) * pp + 1, num_microbatches * vpp)
        return per_rank / vpp * chunks
    return per_rank * min(num_microbatches, pp)


def run_memory(
    shape: TransformerShape,
    split: Split,
    stack: Execution,
    *,
    pp: int,
    vpp: int,
    num_microbatches: int,
    shard_ranks: int,
    zero_stage: int,
    schedule: str,
    recompute: str,
) -> RunMemory:
    """Return the memory of the first or the last pp rank, whichever needs more.

    `shard_ranks` is dp * cp, over which ZeRO shards; ep ranks of them hold other experts. Gated
    models keep their own output matrix; others tie it to the embedding.
    """
    tied = not shape.gated
    held = shape.held_params(split.ep)
    layers = held * shape.layers / pp
    ranks = [layers + shape.embedding_params * (2 if pp == 1 and not tied else 1)]
    if pp > 1:
        ranks.append(layers + shape.embedding_params)
    kept = layer_activation_bytes(shape, split, stack, recompute=recompute)
    if recompute == "selective" and stack.selective_skips_layers:
        all_kept, none_kept = (
            layer_activation_bytes(shape, split, stack, recompute=r) for r in ("none", "full")
        )
        kept = (all_kept + none_kept) / 2
    alive = layers_in_flight(
        schedule=schedule, layers=shape.layers, pp=pp, vpp=vpp, num_microbatches=num_microbatches
    )
    working = 0.0
    if recompute == "full" or (recompute == "selective" and stack.selective_skips_layers):
        working = layer_activation_bytes(shape, split, stack)
    tokens = split.micro_batch * shape.seq_len / split.cp
    # Logits in 16 bits, and their gradient or their softmax in 32 bits.
    loss = 6 * tokens * shape.vocab / split.tp
    # Inside a layer's backward: the first feed-forward matrix's gradient before it is added
    # to the accumulated one, and the gradients of what went in and out of the activation.
    wide = shape.ffn_hidden * (2 if shape.gated else 1) / split.tp
    inside = 2 * shape.hidden * wide + 4 * tokens * wide
    candidates = []
    for position, params in enumerate(ranks):
        is_last = position == len(ranks) - 1
        in_flight = alive if position == 0 else shape.layers / pp
        if schedule.startswith("zb") and position:
            in_flight = alive
        candidates.append(
            _rank_memory(
                params / split.tp,
                (params + (shape.held_params() - held) * shape.layers / pp) / split.tp,
                held / split.tp,
                stack,
                shard_ranks=shard_ranks,
                zero_stage=zero_stage,
                activation_bytes=in_flight * kept + working,
                transient_bytes=max(inside, loss) if is_last else inside,
            )
        )
    return max(candidates, key=lambda memory: memory.total)


def _rank_memory(
    params: float,
    sharded_params: float,
    layer_params: float,
    stack: Execution,
    *,
    shard_ranks: int,
    zero_stage: int,
    activation_bytes: float,
    transient_bytes: float,
) -> RunMemory:
    """Weights in 16 bits, accumulated gradients, and master weights with two moments.

    `sharded_params` are those `shard_ranks` have between them: with ep, more than one holds.
    """
    shard = sharded_params / shard_ranks
    if zero_stage == 3:
        # Sharded in 32 bits, with two layers gathered in 16 and one layer's gradients whole.
        return RunMemory(
            weight_bytes=4 * shard + 4 * layer_params,
            gradient_bytes=4 * shard + stack.reduced_bytes * layer_params,
            state_bytes=8 * shard,
            activation_bytes=activation_bytes,
            transient_bytes=transient_bytes,
        )
    owned = shard if zero_stage else params
    summed = shard + layer_params if zero_stage == 2 else params
    return RunMemory(
        weight_bytes=2 * params,
        gradient_bytes=stack.gradient_bytes * summed,
        state_bytes=stack.state_bytes * owned,
        activation_bytes=activation_bytes,
        transient_bytes=transient_bytes,
    )
