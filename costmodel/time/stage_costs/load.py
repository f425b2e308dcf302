"""Bytes that a run of consecutive blocks needs of one rank: parameters, and one microbatch's.

Parameters add up. What is saved for backward adds up too, but an output that its block saves and
that is the next block's saved input is one tensor, counted once. A peak is the highest point
above what was resident before, so of two runs one after the other the second starts on what the
first saved:

    peak(a + b) = max(peak(a), saved(a) + peak(b))

`runs` does this for many runs at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from planner.plan import Recompute
from profiles.profile import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Bytes of a run of blocks on one rank: numbers, or arrays with an entry for each run."""

    saved_bytes: Amount = 0
    """Saved for backward of one microbatch, without recomputation."""
    saved_peak_bytes: Amount = 0
    """Highest point inside a microbatch's forward or backward, without recomputation."""
    input_bytes: Amount = 0
    """Saved with full recomputation: the inputs of all blocks (one checkpoint a block)."""
    recompute_peak_bytes: Amount = 0
    """Highest point with full recomputation."""
    selective_bytes: Amount = 0
    """Saved with selective recomputation."""
    selective_peak_bytes: Amount = 0
    """Highest point with selective recomputation."""
    side_bytes: Amount = 0
    """Shared non-differentiable inputs (masks, rotary tables): resident once a microbatch,
    however many blocks use them."""
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
    """Most trainable parameters of any block: ZeRO gathers and reduces a block at a time."""
    largest_frozen_bytes: Amount = 0
    """Most frozen parameters of any block."""
    num_params: Amount = 0
    """Trainable parameter tensors; those that blocks of the run share count once."""
    spread_bytes: Amount = 0
    """Part of `param_bytes` that lies on the experts' mesh."""
    num_spread: Amount = 0
    """Part of `num_params` that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a microbatch holds of runs whose blocks differ in what they recompute, side inputs
    apart: numbers, or arrays with an entry for each run.
    """

    kept_bytes: Amount
    """Saved for backward."""
    peak_bytes: Amount
    """Highest point inside a forward or backward."""


LOAD_FIELDS = tuple(f.name for f in fields(StageLoad))
SAVED_AND_PEAK: Mapping[Recompute, tuple[str, str]] = {
    "none": ("saved_bytes", "saved_peak_bytes"),
    "selective": ("selective_bytes", "selective_peak_bytes"),
    "full": ("input_bytes", "recompute_peak_bytes"),
}
"""Fields of what a microbatch saves and of its highest point, by what all blocks recompute."""
