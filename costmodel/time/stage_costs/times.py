"""Seconds of one microbatch on a run of consecutive blocks, nothing exchanged with replicas.

Work of blocks that follow each other on one rank adds up. So along a chain each field has running
sums, and a run takes the difference of two of them: O(1) a run, however long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.language.plan import Recompute
from profiles.profile import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """One microbatch on a run of blocks: numbers, or arrays with an entry for each run."""

    forward_s: Amount = 0.0
    """Seconds of compute of the forward, the host's part included."""
    backward_s: Amount = 0.0
    """Seconds of compute of the backward without recomputation, the host's part included."""
    weight_s: Amount = 0.0
    """Part of `backward_s` that makes weight gradients which a later job, or the end of this, may
    make as well: it needs no gradient to be sent on."""
    recomputed_s: Amount = 0.0
    """Seconds that selective recomputation adds to the backward."""
    rerun_s: Amount = 0.0
    """Seconds that full recomputation adds: the forward, collectives too, of blocks that have a
    backward."""
    rerun_host_s: Amount = 0.0
    """Part of `rerun_s` in which the device waits for the host."""
    rerun_comm_s: Amount = 0.0
    """Part of `rerun_s` that is exposed collectives."""
    comm_forward_s: Amount = 0.0
    """Seconds of exposed collectives on tp and cp in the forward."""
    comm_backward_s: Amount = 0.0
    """Seconds of exposed collectives on tp and cp in the backward."""
    host_forward_s: Amount = 0.0
    """Part of `forward_s` in which the device waits for the host to launch kernels."""
    host_backward_s: Amount = 0.0
    """Part of `backward_s` in which the device waits for the host to launch kernels."""
    forward_flop: Amount = 0.0
    """Flop of the forward."""
    backward_flop: Amount = 0.0
    """Flop of the backward, recomputation not counted."""

    @property
    def whole_forward_s(self) -> Amount:
        """Seconds of the forward, collectives included."""
        return self.forward_s + self.comm_forward_s

    @property
    def whole_backward_s(self) -> Amount:
        """Seconds of the backward, collectives included, recomputation not."""
        return self.backward_s + self.comm_backward_s

    def recompute_s(self, recompute: Recompute | Sequence[Recompute]) -> Amount:
        """Return what recomputation adds to a backward; a choice for all entries or for each.

        Full recomputation runs the whole forward again, collectives too; selective recomputation
        those ops that the plan names, or by default compute only. Neither adds anything to a block
        without a backward.
        """
        names = np.array(recompute)
        selective = np.where(names == "selective", self.recomputed_s, 0.0)
        return np.where(names == "full", self.rerun_s, selective)

    def recomputation(self, recompute: Recompute | Sequence[Recompute]) -> RecomputeTimes:
        """Return the same with its parts."""
        is_full = np.array(recompute) == "full"
        return RecomputeTimes(
            whole_s=self.recompute_s(recompute),
            host_s=is_full * self.rerun_host_s,
            comm_s=is_full * self.rerun_comm_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeTimes:
    """What recomputation adds to the backward of one microbatch: numbers, or an entry for each run.

    Of ops that run again in part (selective recomputation), only the whole is known.
    """

    whole_s: Amount = 0.0
    """Seconds."""
    host_s: Amount = 0.0
    """Part of that in which the device waits for the host, of blocks recomputed in full."""
    comm_s: Amount = 0.0
    """Part of that in exposed collectives, of blocks recomputed in full."""


TIME_FIELDS = tuple(f.name for f in fields(RunTimes))
