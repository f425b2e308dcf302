"""Bytes that a run of consecutive blocks needs of one rank: parameters, and one microbatch's.

Parameters add up. What is saved for backward adds up too, but an output that its block saves and
that is the next block's saved input is one tensor, counted once. `runs` does this for many runs at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from planner.language.plan import Recompute
from profiles.profile import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Bytes of a run of blocks on one rank: numbers, or arrays with an entry for each run."""

    saved_bytes: Amount = 0
    """Saved for backward of one microbatch, without recomputation."""
    input_bytes: Amount = 0
    """Saved with full recomputation: the inputs of all blocks (one checkpoint a block)."""
    selective_bytes: Amount = 0
    """Saved with selective recomputation."""
    side_bytes: Amount = 0
    """Shared inputs (masks, rotary tables, activations that several blocks read): resident once a
    microbatch, however many blocks use them."""
    tail_bytes: Amount = 0
    """Part of `saved_bytes` that is outputs of the last block: the next block's inputs."""
    param_bytes: Amount = 0
    """Local trainable parameters; those that blocks of the run share count once."""
    frozen_bytes: Amount = 0
    """Local parameters without a gradient, and buffers; once, as `param_bytes`."""
    frozen_param_bytes: Amount = 0
    """Part of `frozen_bytes` that is parameters: ZeRO 3 shards and gathers them."""
    frozen_backward_bytes: Amount = 0
    """Part of that in blocks with a backward, which gather them again for it."""
    largest_param_bytes: Amount = 0
    """Most trainable parameters of any block."""
    num_params: Amount = 0
    """Trainable parameter tensors; those that blocks of the run share count once."""
    spread_bytes: Amount = 0
    """Part of `param_bytes` that lies on the experts' mesh."""
    num_spread: Amount = 0
    """Part of `num_params` that does."""
    narrow_bytes: Amount = 0
    """Part of `param_bytes` that ZeRO gathers in 8 bits."""


LOAD_FIELDS = tuple(f.name for f in fields(StageLoad))
SAVED: Mapping[Recompute, str] = {
    "none": "saved_bytes",
    "selective": "selective_bytes",
    "full": "input_bytes",
}
"""Fields of what a microbatch saves, by what all blocks recompute."""
