"""Products of 8-bit floats: both factors cast ahead of each, the result as wide as they were.

Three products of a linear layer y = x w.T, each of rows of one factor with rows of another:

    y = x w.T      rows of x (samples), of w (outputs)
    dx = dy w      rows of dy (samples), of w.T (inputs)
    dw = dy.T x    rows of dy.T (outputs), of x.T (inputs); with a whole number of tiles of samples

"rowwise" scales each such row by its own largest value and has all in e4m3 (3 bits of mantissa);
"tensorwise" has one scale a factor, and gradients in e5m2 (2 bits, a wider range), as torchao's
recipes of these names; "blocks" scales each 32 neighbours in a row and has all in e4m3, as format
MXFP8 of the Open Compute Project (Microscaling Formats 1.0), with scales that let no number exceed
the largest (rounded up, as torchao's recipe mxfp8_cublas_rceil and Transformer Engine have them).
Scales are powers of two: to multiply by one rounds nothing, so a number is rounded once, to the
same digits whatever is scaled beside it, unless it is 2**14 below the largest.

On CUDA the kernels are those of `torch._scaled_mm`. Elsewhere the narrow factors are cast back and
multiplied: the same numbers, but for the order of sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from planner.errors import PlanError
from planner.language.ops.families.products.narrow import (
    BLOCK,
    CAPABILITY,
    SCALES_ALONG,
    SCALES_DOWN,
    weight_is_narrow,
)

E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SIGN_AND_EXPONENT = -(2**23)
"""Bits of a float32 without those of its mantissa."""
_LEAST = 1e-12
"""A row of smaller numbers is scaled as if this were its largest."""


def check_device(device: torch.device, scaling: str) -> str:
    """Return what is to be said of a device that has to emulate products scaled so, empty of one
    that has them; raise PlanError for a GPU without them.
    """
    if device.type == "cpu":
        return (
            "products in 8-bit floats are emulated on CPUs: their factors are cast and multiplied "
            "in bfloat16, to the same numbers, more slowly than with `precision` bf16"
        )
    if device.type != "cuda" or torch.version.hip is not None:
        raise PlanError(
            f"{device} was given a plan of products in 8-bit floats, and their kernels are called "
            "on NVIDIA GPUs alone; search with `precision` bf16"
        )
    needed, since = CAPABILITY[scaling]
    if (capability := torch.cuda.get_device_capability(device)) < needed:
        shown, least = (".".join(map(str, each)) for each in (capability, needed))
        which = f" with a scale for {BLOCK} neighbours" if scaling == "blocks" else ""
        raise PlanError(
            f"{device} has compute capability {shown}, and products in 8-bit floats{which} need "
            f"{least} ({since}) or more; search with `precision` bf16"
        )
    return ""


def product(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    """Return x @ weight.T for x [rows, in] and weight [out, in], both in 8 bits."""
    # Sums in fewer bits, which are faster, are only for activations (as in torchao).
    return _multiplied(x, weight, scaling, fast=True)


def input_gradient(grad: Tensor, weight: Tensor, scaling: str) -> Tensor:
    """Return grad @ weight for grad [rows, out], both in 8 bits."""
    return _multiplied(grad, weight.t(), scaling, _gradient_dtype(scaling))


def weight_gradient(grad: Tensor, x: Tensor, scaling: str) -> Tensor:
    """Return grad.T @ x, [out, in]; in 8 bits where kernels take that many rows."""
    if not weight_is_narrow(len(x), scaling):
        return torch.mm(grad.t(), x)
    return _multiplied(grad.t(), x.t(), scaling, _gradient_dtype(scaling))


def _gradient_dtype(scaling: str) -> torch.dtype:
    return _E5M2 if scaling == "tensorwise" else E4M3


def _multiplied(
    left: Tensor, right: Tensor, scaling: str, dtype: torch.dtype = E4M3, *, fast: bool = False
) -> Tensor:
    """Return left @ right.T, of which `left` is cast to `dtype` and `right` to e4m3."""
    made: Tensor
    if scaling == "blocks":
        narrow, back = cast_blocks(left)
        other, other_back = cast_blocks(right)
        made = torch.ops.planner.product_of_blocks(narrow, other, back, other_back, left.dtype)
        return made
    by_row = scaling == "rowwise"
    narrow, back = cast(left, dtype, by_row=by_row)
    other, other_back = cast(right, E4M3, by_row=by_row)
    made = torch.ops.planner.narrow_product(narrow, other, back, other_back, left.dtype, fast)
    return made


def cast(x: Tensor, dtype: torch.dtype, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix, or several in one tensor, in 8 bits, row by row in memory, and what its
    values are to be multiplied by: a number, or one for each row.
    """
    scale = scale_for(
        torch.linalg.vector_norm(x, math.inf, dim=-1 if by_row else None, keepdim=by_row), dtype
    )
    scaled = x * scale.to(x.dtype)
    narrow = scaled.to(dtype, memory_format=torch.contiguous_format)
    del scaled
    return narrow, scale.reciprocal()


def cast_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3, row by row in memory, and what each block of its rows is to be
    multiplied by, [rows, blocks].
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    narrow, back = cast(blocks, E4M3, by_row=True)
    return narrow.flatten(-2), back.squeeze(-1)


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that numbers up to these are multiplied by to fill a dtype."""
    # (One name for all that it is made of, which goes with it.)
    scale = torch.finfo(dtype).max / largest.float().clamp(min=_LEAST)
    return (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)


torch.library.define(
    "planner::narrow_product",
    "(Tensor left, Tensor right, Tensor left_back, Tensor right_back, ScalarType dtype, bool fast)"
    " -> Tensor",
)


@torch.library.impl("planner::narrow_product", "CPU")
def _emulated(
    left: Tensor, right: Tensor, left_back: Tensor, right_back: Tensor, dtype: torch.dtype, _: bool
) -> Tensor:
    made = torch.mm(left.to(dtype), right.to(dtype).t())
    return made.mul_(left_back.to(dtype)).mul_(right_back.t().to(dtype))


@torch.library.impl("planner::narrow_product", "CUDA")
def _on_cuda(
    left: Tensor,
    right: Tensor,
    left_back: Tensor,
    right_back: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    # Kernels with a scale a row are slow with exact sums: these scale their result instead, which
    # powers of two do exactly.
    by_kernel = fast or left_back.dim() == 0
    one = left_back.new_ones(())
    made = torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_back if by_kernel else one,
        scale_b=right_back.t() if by_kernel else one,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return made if by_kernel else made.mul_(left_back.to(dtype)).mul_(right_back.t().to(dtype))


@torch.library.register_fake("planner::narrow_product")
def _(
    left: Tensor,
    right: Tensor,
    left_back: Tensor,
    right_back: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)


torch.library.define(
    "planner::product_of_blocks",
    "(Tensor left, Tensor right, Tensor left_back, Tensor right_back, ScalarType dtype) -> Tensor",
)


@torch.library.impl("planner::product_of_blocks", "CPU")
def _emulated_blocks(
    left: Tensor, right: Tensor, left_back: Tensor, right_back: Tensor, dtype: torch.dtype
) -> Tensor:
    # Powers of two times e4m3 are numbers of `dtype`, so that only the product rounds.
    wide = (
        (narrow.to(dtype).unflatten(-1, (-1, BLOCK)) * back.to(dtype).unsqueeze(-1)).flatten(-2)
        for narrow, back in ((left, left_back), (right, right_back))
    )
    first, second = wide
    return torch.mm(first, second.t())


@torch.library.impl("planner::product_of_blocks", "CUDA")
def _blocks_on_cuda(
    left: Tensor, right: Tensor, left_back: Tensor, right_back: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=in_order_of_tensor_cores(left_back.to(torch.float8_e8m0fnu)),
        scale_b=in_order_of_tensor_cores(right_back.to(torch.float8_e8m0fnu)),
        out_dtype=dtype,
    )


_LINES = 32
"""Lines of a tile of scales in memory."""


def in_order_of_tensor_cores(scales: Tensor) -> Tensor:
    """Return scales of blocks, [rows, blocks], in the order in which products read them, flat.

    Tiles of 128 rows and 4 blocks lie one behind another, row by row of tiles; in a tile row r and
    block b lie at 16 (r mod 32) + 4 (r div 32) + b, and what is beyond the matrix is zero (NVIDIA,
    cuBLAS 12.9, "1D Block Scaling Factors Layout").
    """
    rows, blocks = scales.shape
    down, along = -(-rows // SCALES_DOWN), -(-blocks // SCALES_ALONG)
    # (Bytes: there is arithmetic for no such float.)
    tiles = torch.zeros(
        (down * SCALES_DOWN, along * SCALES_ALONG), dtype=torch.uint8, device=scales.device
    )
    tiles[:rows, :blocks] = scales.view(torch.uint8)
    parts = tiles.view(down, SCALES_DOWN // _LINES, _LINES, along, SCALES_ALONG)
    return parts.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


@torch.library.register_fake("planner::product_of_blocks")
def _(
    left: Tensor, right: Tensor, left_back: Tensor, right_back: Tensor, dtype: torch.dtype
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)
