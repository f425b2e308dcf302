"""Casts of products in 8 bits: the bytes that each way of scaling moves beside the products.

A product takes narrow copies of its input, its weight and, in the backward, the gradient that
arrives. An element is read in 16 bits, and written narrow twice: products read it along either side
of the matrix. What else is moved depends on what a scale is of:

delayed          the last steps' largest values: a norm of a library of layers writes its result
                 narrow itself (Transformer Engine, module/layernorm_linear.py)
current          the tensor's own largest value (Transformer Engine, Float8CurrentScaling): one more
                 pass, unless a norm of that library finds it; weights are cast once a step
tensorwise       the tensor's own largest value: one more pass, unless the kernel that makes the
                 tensor finds it; weights are cast by shard, gathered in 8 bits, and turned for the
                 backward
rowwise          each row's, each column's: the turned copy is made in 16 bits, and cast after that
rowwise-forward  the same, with the gradient of weights in 16 bits
blocks           that of 32 elements, once along either side, which products take as they are
                 (since Blackwell)
tiles            that of 128 elements, or 128 x 128 of a weight, which products apply beside their
                 sums (Hopper: DeepGEMM; Transformer Engine, Float8BlockScaling)

Bytes of the last four: pytorch/ao at 0598012907 (2025), testing/training/roofline_utils.py,
get_tensor_memory_traffic_ovhd_s, kernel by kernel; of tensorwise weights float8/fsdp_utils.py and
float8/float8_ops.py (preprocess_addmm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """What a way of scaling moves; bytes are of one element that is cast."""

    ready_bytes: int
    """Of an input or a gradient whose maker writes it narrow, or finds its scale."""
    alone_bytes: int
    """Of another input or gradient."""
    weight_bytes: int = 0
    """Of a weight, for each forward."""
    weight_back_bytes: int = 0
    """Of a weight, for each backward."""
    gathers_narrow: bool = False
    """Shards of weights are gathered in 8 bits."""
    wide_weight_gradient: bool = False
    """The gradient of a weight is a product in 16 bits."""
    saves_narrow: bool = False
    """What is saved for the backward is the narrow copy of an input, not the input."""
    rate_part: float = 1.0
    """Rate of products over that of kernels with one scale a tensor."""


CUTLASS_PART = 0.95
"""PyTorch's kernel with a scale a row reaches 0.90 to 1.00 of cuBLAS's rate with one a tensor
(pytorch/pytorch issue 147971, February 2025, H100): the middle of both."""

TILES_PART = 0.9
"""Products of 4 groups of 8,192 rows reach 1,297 (7,168 deep) and 1,099 TFLOP/s (2,048 deep) with a
scale a tile on H800 (DeepGEMM's README at a6d97a1); with one a tensor Hopper reaches 1,403 in the
best case (ml-engineering, MAMF), of which steps of such depths leave 1,374 and 1,307: 0.94 and
0.84."""

_BLOCKS = Casts(ready_bytes=4, alone_bytes=6, weight_bytes=3, weight_back_bytes=3)
"""Both copies of a tensor by blocks, those of weights in each forward and backward."""

CASTS: Mapping[str, Casts] = {
    "delayed": Casts(ready_bytes=0, alone_bytes=4, saves_narrow=True),
    "current": Casts(ready_bytes=4, alone_bytes=6, saves_narrow=True),
    "tensorwise": Casts(ready_bytes=4, alone_bytes=6, weight_back_bytes=2, gathers_narrow=True),
    "rowwise": Casts(
        ready_bytes=6, alone_bytes=8, weight_bytes=3, weight_back_bytes=7, rate_part=CUTLASS_PART
    ),
    "rowwise-forward": Casts(
        ready_bytes=1,
        alone_bytes=3,
        weight_bytes=3,
        weight_back_bytes=3,
        wide_weight_gradient=True,
        rate_part=CUTLASS_PART,
    ),
    "blocks": _BLOCKS,
    "blocks-kept": replace(_BLOCKS, saves_narrow=True),
    "tiles": replace(_BLOCKS, saves_narrow=True, rate_part=TILES_PART),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCasts:
    """What casts of our runtime move ahead of each product (`planner.runtime.stage.calls.narrow`),
    a factor at a time; bytes are of one number.
    """

    bytes: int
    """Of a factor that is cast along the rows of a matrix."""
    runs_bytes: int
    """Of one that is cast along the rows of runs, and put where runs are whole tiles."""


OWN_CASTS: Mapping[str, OwnCasts] = {
    "eager": OwnCasts(
        # The largest, times the scale, the cast.
        bytes=2 + (2 + 2) + (2 + 1),
        # Absolute values, the largest of each run, its scale for each number, times that, the cast,
        # zeros, put into places, turned.
        runs_bytes=(2 + 2) + 2 + 2 + (2 + 2 + 2) + (2 + 1) + 1 + (1 + 1) + (1 + 1),
    ),
    # One kernel finds the largest, one multiplies and casts.
    "fused": OwnCasts(bytes=2 + (2 + 1), runs_bytes=2 + (2 + 1) + 1 + (1 + 1) + (1 + 1)),
}
"""By how ops that only move bytes run."""

SCALED_BYTES = 8
"""Of each entry of a gradient that our runtime multiplies by scales of its rows and columns: two
passes."""
