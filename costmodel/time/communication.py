"""Seconds of what ranks exchange outside blocks: gradients, gathered weights, activations.

A collective is priced for a single size; what compute hides of it is arithmetic that takes arrays
as well as numbers. `docs/cost-model.md` has the formulas with their legend and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from costmodel.execution.casts import OWN_CASTS
from costmodel.execution.execution import Execution
from planner.language.plan.replication import Replication
from profiles import Group, Profile
from profiles.profile import Amount
from profiles.records import ZeroWork

HALF_BYTES = 2.0
"""Of a number in 16 bits."""
BUCKET_BYTES = 25 * 2**20
"""Gradients go out in flat messages of about this size
(`planner.runtime.state.gradients.reduce`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSeconds:
    """What one rank of a stage exchanges with its replicas; `hidden_behind` compute or not."""

    forward_s: Amount = 0.0
    """Seconds of messages in every microbatch's forward (ZeRO 3)."""
    backward_s: Amount = 0.0
    """Seconds of messages in every microbatch's backward (ZeRO 2 and 3)."""
    first_forward_s: Amount = 0.0
    """Seconds of messages in the step's first forward (ZeRO 1 and 2 gather weights)."""
    last_backward_s: Amount = 0.0
    """Seconds of messages in the step's last backward (ZeRO 1 reduces gradients)."""
    after_s: Amount = 0.0
    """Seconds of messages after the last job (ZeRO 0 sums gradients)."""
    host_forward_s: Amount = 0.0
    """Seconds of FSDP2's hooks in every forward, which nothing hides."""
    host_backward_s: Amount = 0.0
    """Seconds of FSDP2's hooks in every backward, which nothing hides."""

    @property
    def once_s(self) -> Amount:
        """Seconds that come once a step, whatever the number of microbatches."""
        return self.first_forward_s + self.last_backward_s + self.after_s

    def hidden_behind(
        self, profile: Profile, *, forward_s: Amount, backward_s: Amount, num_pieces: Amount
    ) -> DataParallelSeconds:
        """Return what stays exposed beside one microbatch's compute of the stage, the host's
        part in it.

        On a GPU weights are gathered one block ahead and gradients scattered one block
        behind, on streams of their own; on a CPU the runtime waits for each, and in it for
        the slowest rank.
        """

        def exposed(seconds: Amount, compute_s: Amount) -> Amount:
            if profile.cluster.device_type == "cpu":
                more = profile.wait_seconds(compute_s, num_pieces)
                return seconds + np.where(np.asarray(seconds) > 0, more, 0.0)
            return exposed_seconds(profile, seconds, compute_s, num_pieces=num_pieces)

        return DataParallelSeconds(
            forward_s=exposed(self.forward_s, forward_s) + self.host_forward_s,
            backward_s=exposed(self.backward_s, backward_s) + self.host_backward_s,
            first_forward_s=exposed(self.first_forward_s, forward_s),
            last_backward_s=exposed(self.last_backward_s, backward_s),
            after_s=self.after_s,
        )


def message_pieces(execution: Execution, num_blocks: Amount) -> Amount:
    """Return the pieces in which a stage's weights and gradients are sent beside its compute: a
    block each in our runtime, and so fine in others that nothing waits for the first.
    """
    return num_blocks if execution.prices == "profile" else np.inf


def exposed_seconds(
    profile: Profile, seconds: Amount, compute_s: Amount, *, num_pieces: Amount
) -> Amount:
    """Return by how much messages lengthen the compute they run beside.

    With S seconds of messages and C of compute in k pieces, S' = S - S/k and C' = C (1 - 1/k),

        exposed = S/k + min(S', S' s_M (1 - 1/s_C))                   if S' s_M <= C' s_C
                  S/k + min(S', C' (s_C - 1) + S' - C' s_C / s_M)     else

    s_C, s_M: how much slower compute and messages are while both run (they share the device's
    memory and its multiprocessors), from the profile. min(S', ..): never worse than in turn.
    """
    # The first piece has nothing to hide behind: its block waits for it.
    alone = seconds / np.maximum(num_pieces, 1)
    compute = compute_s * (1 - 1 / np.maximum(num_pieces, 1))
    return alone + beside_seconds(profile, seconds - alone, compute)


def beside_seconds(profile: Profile, messages: Amount, compute: Amount) -> Amount:
    """Return by how much messages lengthen the compute that all of them run beside."""
    slow_compute = profile.overlap_slowdown("compute")
    slow_messages = profile.overlap_slowdown("communication")
    # Messages end first: they slowed the compute while they lasted.
    within = messages * slow_messages * (1 - 1 / slow_compute)
    # Compute ends first: it was slowed to its end, and the rest of the messages is bare.
    beyond = compute * (slow_compute - 1) + messages - compute * slow_compute / slow_messages
    ends_first = messages * slow_messages <= compute * slow_compute
    return np.minimum(np.where(ends_first, within, beyond), messages)


ALONE = Group(ranks_per_node=1)
"""A rank without others."""


def data_parallel_seconds(
    profile: Profile,
    group: Group,
    replication: Replication,
    *,
    copies: Group = ALONE,
    param_bytes: float,
    num_blocks: int,
    num_tensors: int = 0,
    frozen_bytes: float = 0.0,
    frozen_backward_bytes: float = 0.0,
    narrow_bytes: float = 0.0,
) -> DataParallelSeconds:
    """Return what keeping replicas equal takes, nothing hidden, for one rank's parameters.

    As the runtime does it: ZeRO 0 sums gradients in buckets after the last backward; ZeRO 1
    gathers weights once a step and reduce-scatters gradients once; ZeRO 2 reduce-scatters
    every microbatch; ZeRO 3 also gathers for every forward and backward. With ZeRO a message
    is one block's weights, and FSDP2's own work for each of them and for each of `num_tensors`
    comes to it. Shards on the host are copied up before and gradients down after. `group` is of the
    ranks that share (without ZeRO all of them), `copies` of those with the same shards, which sum
    these in the last backward.

    Frozen parameters have no gradient to sum. ZeRO 3 alone shards them: `frozen_bytes` are gathered
    for every forward, `frozen_backward_bytes` of them again for every backward. `narrow_bytes` of
    trained parameters are gathered in 8 bits: ranks find the largest values first, cast their
    shards, and cast what arrives back (`planner.runtime.state.narrow_gather`).
    """
    if group.size == 1 or param_bytes + frozen_bytes == 0:
        return DataParallelSeconds()
    zero_stage, on_host = replication.zero_stage, replication.optimizer_on_host
    # Gradients travel as wide as they are summed: fp32 where parameters are bf16.
    reduced = param_bytes * replication.gradient_factor

    def message(kind: str, num_bytes: float, count: int, group: Group = group) -> float:
        # Each message pays its own latency, so many small ones take longer than a large one.
        count = max(1, count)
        return count * profile.collective_seconds(kind, num_bytes / count, group).seconds

    if not replication.is_sharded:
        # Gradients are summed after the last microbatch, when nothing is left to hide behind.
        return DataParallelSeconds(
            after_s=message("all_reduce", reduced, ceil(reduced / BUCKET_BYTES))
        )

    def own(work: ZeroWork, num_bytes: float) -> float:
        return profile.step_seconds(
            work, num_bytes=num_bytes, num_tensors=num_tensors, num_calls=num_blocks
        ).seconds

    # Of each number in 8 bits: the cast of a shard, and what arrives is read, cast and multiplied.
    cast_bytes = OWN_CASTS["eager"].bytes / group.size + (1 + 2) + (2 + 2)
    # FSDP2 copies shards into one flat message and out of it; measured work has the copies in it.
    copied = copies_s_per_byte(profile, group.size)
    hooks = own("zero_forward", param_bytes + frozen_bytes), own("zero_backward", reduced)

    def gathered(frozen: float) -> float:
        whole = param_bytes + frozen
        if whole == 0:
            return 0.0
        narrow = min(narrow_bytes, param_bytes)  # (what blocks share is gathered in 16 bits)
        seconds = message("all_gather", whole - narrow / HALF_BYTES, num_blocks)
        if narrow:
            seconds += message("all_reduce", HALF_BYTES * num_tensors, num_blocks)
            seconds += narrow / HALF_BYTES * cast_bytes / profile.cluster.memory_bytes_per_s
        # A measurement has those copies in it; where there is none it answers 0, and the passes
        # over memory stand.
        seconds += max(copied * whole, own("zero_gather", whole))
        if on_host:  # what rests there of trained ones is as wide as the gradients
            shard = (reduced + frozen) / group.size
            seconds += profile.step_seconds("host_to_device", num_bytes=shard).seconds
        return seconds

    scatter = 0.0
    if reduced:
        scatter = message("reduce_scatter", reduced, num_blocks)
        # `zero_reduce` was measured with the backward hooks, which are counted apart as the host's.
        scatter += max(copied * reduced, own("zero_reduce", reduced) - hooks[1])
        if on_host:
            shard = reduced / group.size
            scatter += profile.step_seconds("device_to_host", num_bytes=shard).seconds
    across = 0.0
    if reduced and copies.size > 1:
        # HSDP: each rank's shard of the sum, once more over the copies of the shards.
        across = message("all_reduce", reduced / group.size, num_blocks, copies)
    # ZeRO 1 and 2 keep gathered weights for the step; ZeRO 1 sums whole gradients until its end.
    gathers_once, reduces_once = zero_stage < 3, zero_stage == 1
    gather = gathered(frozen_bytes)
    again = 0.0 if gathers_once else gathered(frozen_backward_bytes)
    return DataParallelSeconds(
        forward_s=0.0 if gathers_once else gather,
        backward_s=again + (0.0 if reduces_once else scatter),
        first_forward_s=gather if gathers_once else 0.0,
        last_backward_s=across + (scatter if reduces_once else 0.0),
        host_forward_s=hooks[0],
        # A backward that neither reduces nor gathers anything has no hook to run.
        host_backward_s=hooks[1] if param_bytes + frozen_backward_bytes else 0.0,
    )


def copies_s_per_byte(profile: Profile, replicas: int) -> float:
    """Return what FSDP's copies take beside a message, for each of its bytes: of shards into it,
    and of what was gathered out of it; and the reverse.
    """
    # The whole tensor and the rank's shard are each read once and written once.
    return 2 * (1 + 1 / replicas) / profile.cluster.memory_bytes_per_s


def transfer_seconds(profile: Profile, group: Group, num_bytes: float) -> float:
    """Return the transfer of one microbatch's boundary tensors to the next stage's rank."""
    return profile.collective_seconds("send_recv", num_bytes, group).seconds if num_bytes else 0.0


def boundary_seconds(
    profile: Profile, pp_group: Group, tp: Group, *, num_bytes: float, whole_bytes: float
) -> float:
    """Return the transfer of `num_bytes` between stages, `whole_bytes` of them of tensors that
    all tp ranks hold: between nodes each rank sends its part of those, and tp ranks that
    share a node gather them on arrival (`planner.language.lowering.wiring.sends_pieces`).
    """
    # Pieces pay where the way between stages is slower than the links among tp ranks.
    if not whole_bytes or tp.size == 1 or tp.num_nodes > 1 or pp_group.num_nodes == 1:
        return transfer_seconds(profile, pp_group, num_bytes)
    sent = num_bytes - whole_bytes + whole_bytes / tp.size
    gather = profile.collective_seconds("all_gather", whole_bytes, tp).seconds
    return transfer_seconds(profile, pp_group, sent) + gather
