"""Every part of memory that is resident between two jobs, activations apart: `PARTS`.

    bytes of a part = sum over kinds of state k of  times_k(ranks, phase) * amount_k

Both fidelities read this one table. They differ in the amounts: the bound takes those of a stage's
load, the exact one those of a rank's stages, with FSDP2's padding, step counts and tables. A new
part of memory that does not come and go with jobs is an entry here.

    stepped = factor * own      bytes the optimizer steps on
    summed  = sum_factor * own  bytes of its gradients' sums

    own         trained parameters, under ZeRO shards of them
    factor      bytes of a master weight per byte of its parameter: 2 in bf16, 1 otherwise
    sum_factor  bytes of a gradient's sum per byte of its parameter, `Execution.sum_factor`: in
                bf16 2 in most runtimes, 1 in some, which widen it for the optimizer's step: 18 and
                20 bytes a parameter with AdamW (Megatron-LM, docs of the distributed optimizer)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from costmodel.memory.parts import Ranks
from profiles.profile import Amount


class Phase(IntEnum):
    """A part of the step in which the same state is resident."""

    BEFORE_BACKWARD = 0
    """Before the rank's first backward has ended."""
    AFTER_BACKWARD = 1
    """After it, until the last job."""
    UPDATE = 2
    """In the optimizer's step: no activations are left."""


class State(NamedTuple):
    """Bytes that a rank has of each kind of state; or how many times of each a part takes."""

    trained: Amount = 0
    """Trained parameters, whole, without those that ZeRO leaves whole."""
    alone: Amount = 0
    """Trained parameters that ZeRO leaves whole, as no ranks share shards of them: experts."""
    own: Amount = 0
    """Trained parameters, or shards of them, that the rank updates; those alone too."""
    frozen: Amount = 0
    """Whole tensors that are not trained: buffers, constants, parameters, tables."""
    own_frozen: Amount = 0
    """Shards of parameters that are not trained."""
    step_counts: Amount = 0
    """The optimizer's counters, one for each trained tensor."""
    table_states: Amount = 0
    """Moments and masters of tables with a gradient of rows."""
    table_rows: Amount = 0
    """Gradients of their rows in a step."""
    batch: Amount = 0
    """What the rank is given of the batch."""
    workspaces: Amount = 0
    """Workspaces of matrix products."""

    def of(self, amounts: State) -> Amount:
        """Return the bytes of a part that takes each kind so many times."""
        return sum(times * amount for times, amount in zip(self, amounts, strict=True) if times)


def weights(ranks: Ranks, phase: Phase) -> State:
    """Return the weights at rest: under ZeRO the shard, if that is here. What it leaves whole is
    here in any case, in bf16 beside its master.
    """
    return State(alone=1) if ranks.rests_elsewhere else State(own=1)


def gathered(ranks: Ranks, phase: Phase) -> State:
    """Return whole weights beside the shards: ZeRO 1 and 2 gather all in the first forward and keep
    them to the last backward. The block or two that ZeRO 3 gathers at a time are not counted.
    """
    keeps = ranks.is_sharded and ranks.zero_stage < 3
    return State(trained=int(keeps and phase is not Phase.UPDATE))


def gradients(ranks: Ranks, phase: Phase) -> State:
    """Return the sums of gradients: whole without ZeRO 2 or 3, where only shards outlive a block's
    backward. With the optimizer on the host these shards are there.
    """
    factor = ranks.sum_factor
    if ranks.has_buckets:
        return State(trained=factor, alone=factor)
    if phase is Phase.BEFORE_BACKWARD:
        return State()
    # ZeRO 1 sums whole gradients over microbatches; the last backward reduces them to shards.
    if not ranks.is_sharded or (ranks.zero_stage == 1 and phase is Phase.AFTER_BACKWARD):
        return State(trained=factor, alone=factor)
    return State(own=0 if ranks.optimizer_on_host else factor)


def buckets(ranks: Ranks, phase: Phase) -> State:
    """Return buckets of gradients beside the sums, which replicas without ZeRO send."""
    return State(own=ranks.bucket_factor * ranks.sums_in_buckets)


def optimizer(ranks: Ranks, phase: Phase) -> State:
    """Return AdamW's two moments, in bf16 the fp32 masters, and step counts."""
    return State(
        own=ranks.optimizer_factor,
        step_counts=int(not ranks.optimizer_on_host),
    )


def update_scratch(ranks: Ranks, phase: Phase) -> State:
    """Return the copy of what it updates that a fused or foreach step makes on a GPU."""
    copies = phase is Phase.UPDATE and ranks.copies_update
    return State(own=ranks.gradient_factor * copies)


def frozen(ranks: Ranks, phase: Phase) -> State:
    """Return buffers, constants and parameters that are not trained. ZeRO 3 shards the parameters,
    on the host if the optimizer is there; ZeRO 1 and 2 leave them whole.
    """
    return State(frozen=1, own_frozen=int(not ranks.optimizer_on_host))


def table_states(ranks: Ranks, phase: Phase) -> State:
    """Return the moments of tables with a gradient of rows, and in bf16 masters."""
    return State(table_states=1)


def table_rows(ranks: Ranks, phase: Phase) -> State:
    """Return the gradients of rows of a step."""
    return State(table_rows=1)


def batch(ranks: Ranks, phase: Phase) -> State:
    """Return the batch, which the caller holds to the end of the step."""
    return State(batch=1)


def workspaces(ranks: Ranks, phase: Phase) -> State:
    """Return the workspaces of matrix products; the bound has none."""
    return State(workspaces=1)


class Part(NamedTuple):
    """A part of a rank's memory."""

    field: str
    """The field of `MemoryParts` that it is reported in."""
    times: Callable[[Ranks, Phase], State]
    """How many times of each kind of state it takes in a phase."""
    is_walked: bool = False
    """Whether the exact fidelity counts it job by job (`exact.fsdp_walk`, `exact.rank_walk`) and in
    the optimizer's step: a part that is not the same in all phases, or not here alone."""


PARTS: dict[str, Part] = {
    "weights": Part("parameter_bytes", weights),
    "gathered": Part("parameter_bytes", gathered, is_walked=True),
    "gradients": Part("gradient_bytes", gradients, is_walked=True),
    "buckets": Part("gradient_bytes", buckets),
    "optimizer": Part("optimizer_bytes", optimizer),
    "update_scratch": Part("transient_bytes", update_scratch, is_walked=True),
    "frozen": Part("parameter_bytes", frozen),
    "table_states": Part("optimizer_bytes", table_states),
    "table_rows": Part("gradient_bytes", table_rows),
    "batch": Part("batch_bytes", batch),
    "workspaces": Part("parameter_bytes", workspaces),
}
"""Every part, by name."""
