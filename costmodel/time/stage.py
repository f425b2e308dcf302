"""StageLoad: what a run of blocks takes, as sums that grow block by block.

Every field is a number or a numpy array of numbers, so a search can hold the loads of many
candidate stages at once. Times and kept bytes add; a peak is the highest point above what
was alive before, so of two loads one after the other the second starts on what the first
keeps: peak(a + b) = max(peak(a), kept(a) + peak(b)).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from costmodel.time.program import ProgramCost
from planner.plan import Recompute
from profiles.profile import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One microbatch on a run of consecutive blocks, and the parameters they hold.

    `weight_s` is the part of `backward_s` that makes weight gradients; `comm_*_s` are exposed
    tensor-parallel collectives. `saved_bytes` and `saved_peak_bytes`
    hold without recompute, `input_bytes` and `recompute_peak_bytes` with full recompute (one
    checkpoint a block), `selective_*` with selective recompute, which adds `remade_s` to the
    backward. `side_bytes` are kept once however many blocks use them.
    `tail_bytes` are what the last block keeps of its outputs, not to be counted again as the
    next block's input. `largest_param_bytes` is the most any one block holds.
    """

    forward_s: Amount = 0.0
    backward_s: Amount = 0.0
    weight_s: Amount = 0.0
    remade_s: Amount = 0.0
    comm_forward_s: Amount = 0.0
    comm_backward_s: Amount = 0.0
    host_forward_s: Amount = 0.0
    host_backward_s: Amount = 0.0
    forward_flop: Amount = 0.0
    backward_flop: Amount = 0.0
    saved_bytes: Amount = 0
    saved_peak_bytes: Amount = 0
    input_bytes: Amount = 0
    recompute_peak_bytes: Amount = 0
    selective_bytes: Amount = 0
    selective_peak_bytes: Amount = 0
    side_bytes: Amount = 0
    tail_bytes: Amount = 0
    param_bytes: Amount = 0
    frozen_bytes: Amount = 0
    largest_param_bytes: Amount = 0
    num_blocks: Amount = 0
    num_params: Amount = 0

    def __add__(self, other: StageLoad) -> StageLoad:
        """Return the load of this run followed by another."""
        shared = np.minimum(self.tail_bytes, other.saved_bytes)
        saved = self.saved_bytes - shared
        return StageLoad(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            weight_s=self.weight_s + other.weight_s,
            remade_s=self.remade_s + other.remade_s,
            comm_forward_s=self.comm_forward_s + other.comm_forward_s,
            comm_backward_s=self.comm_backward_s + other.comm_backward_s,
            host_forward_s=self.host_forward_s + other.host_forward_s,
            host_backward_s=self.host_backward_s + other.host_backward_s,
            forward_flop=self.forward_flop + other.forward_flop,
            backward_flop=self.backward_flop + other.backward_flop,
            saved_bytes=saved + other.saved_bytes,
            saved_peak_bytes=np.maximum(self.saved_peak_bytes, saved + other.saved_peak_bytes),
            input_bytes=self.input_bytes + other.input_bytes,
            recompute_peak_bytes=np.maximum(
                self.recompute_peak_bytes, self.input_bytes + other.recompute_peak_bytes
            ),
            selective_bytes=self.selective_bytes + other.selective_bytes,
            selective_peak_bytes=np.maximum(
                self.selective_peak_bytes, self.selective_bytes + other.selective_peak_bytes
            ),
            side_bytes=np.maximum(self.side_bytes, other.side_bytes),
            tail_bytes=other.tail_bytes,
            param_bytes=self.param_bytes + other.param_bytes,
            frozen_bytes=self.frozen_bytes + other.frozen_bytes,
            largest_param_bytes=np.maximum(self.largest_param_bytes, other.largest_param_bytes),
            num_blocks=self.num_blocks + other.num_blocks,
            num_params=self.num_params + other.num_params,
        )


def block_load(cost: ProgramCost) -> StageLoad:
    """Return the load of one block.

    Its activation inputs stay alive until its backward, kept by autograd or not: they are
    where their own gradient is left.
    """
    unsaved_input = cost.input_bytes - cost.saved_input_bytes
    recompute_peak = max(
        cost.forward_peak_bytes + cost.input_bytes, cost.backward_peak_bytes + unsaved_input
    )
    return StageLoad(
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weight_s=cost.weight_s,
        remade_s=cost.remade_s,
        comm_forward_s=cost.forward_comm_s,
        comm_backward_s=cost.backward_comm_s,
        host_forward_s=cost.host_forward_s,
        host_backward_s=cost.host_backward_s,
        forward_flop=cost.forward_flop,
        backward_flop=cost.backward_flop,
        saved_bytes=cost.saved_bytes,
        saved_peak_bytes=max(cost.forward_peak_bytes + cost.input_bytes, cost.backward_peak_bytes),
        input_bytes=cost.input_bytes,
        recompute_peak_bytes=recompute_peak,
        selective_bytes=cost.input_bytes + cost.selective_bytes,
        selective_peak_bytes=recompute_peak + cost.selective_unsaved_bytes,
        side_bytes=cost.side_bytes,
        tail_bytes=cost.saved_output_bytes,
        param_bytes=cost.param_bytes,
        frozen_bytes=cost.frozen_bytes,
        largest_param_bytes=cost.param_bytes,
        num_blocks=1,
        num_params=cost.num_params,
    )


def again_seconds(load: StageLoad, recompute: Recompute) -> Amount:
    """Return what recomputation adds to a backward: results of collectives are kept when it
    is selective, and made again when it is full.
    """
    if recompute == "full":
        return load.forward_s + load.comm_forward_s
    return load.remade_s if recompute == "selective" else 0.0 * load.remade_s


def join(loads: Iterable[StageLoad]) -> StageLoad:
    """Return the load of consecutive runs; nothing for none."""
    total = StageLoad()
    for load in loads:
        total = total + load
    return total
