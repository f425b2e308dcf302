"""Products of runs of rows in 8 bits: experts' matrices, each with the rows of its own run.

Three products of y = x w of each run, whose factors are cast ahead of each by rows along the dim
that is summed over (`planner.runtime.stage.calls.narrow`):

    y = x w        rows of x, of w.T (an output of an expert)
    dx = dy w.T    rows of dy, of w (an input of an expert)
    dw = x.T dy    rows of x.T and dy.T inside each run

The last sums over the rows of a run. Kernels take runs of whole tiles there, so both factors are
put where each run begins at a multiple of a tile, with zeros between, which add nothing. How long
runs are is read on the device alone: there are never more than `rows_in_tiles`.

On Hopper the kernels are those of `torch._scaled_grouped_mm`, which sum in fewer bits as torchao's
do (its rowwise recipe of experts). Elsewhere the narrow factors are cast
back and multiplied: the same numbers, but for the order of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.language.graph import ModelGraph
from planner.language.ops.families.products.narrow import TILE, rows_in_tiles, scaling_of
from planner.language.ops.record import family_of
from planner.runtime.stage.calls.narrow import E4M3, cast, scale_for

HOPPER = 9
"""Major compute capability of the devices that have the kernels."""


def emulated_experts(device: torch.device, graph: ModelGraph) -> str:
    """Return what is to be said of a GPU that has to emulate products of a model's experts."""
    ops = (op for program in graph.classes for op in program.ops)
    if device.type != "cuda" or not any(
        scaling_of(op) and family_of(op.target).deals_rows for op in ops
    ):
        return ""
    if torch.cuda.get_device_capability(device)[0] == HOPPER:
        return ""
    return (
        f"products of experts in 8-bit floats are emulated on {device}, as their kernels are for "
        "Hopper GPUs: their factors are cast and multiplied in bfloat16, to the same numbers, more "
        "slowly than with `precision` bf16"
    )


def narrow_runs(rows: Tensor, weights: Tensor, ends: Tensor, scaling: str = "rowwise") -> Tensor:
    """Return each run of rows [n, k] times its own matrix of `weights` [e, k, m], in 8 bits.

    `ends` [e] says where each run ends. What rows behind the last run come to is not said.
    """
    assert scaling == "rowwise", scaling
    made: Tensor = _NarrowRuns.apply(rows, weights, ends)
    return made


class _NarrowRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        of_rows, of_weights, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weights else None, weights if of_rows else None, ends)
        ctx.num_runs = len(weights)
        return _multiplied(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        of_rows = of_weights = None
        if weights is not None:
            of_rows = _multiplied(grad, weights.transpose(1, 2), ends)
        if rows is not None:
            of_weights = _summed_over_rows(rows, grad, ends)
        return of_rows, of_weights, None


def _multiplied(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return rows [n, k] of each run times its matrix of [e, k, m]."""
    narrow, back = cast(left, E4M3, by_row=True)
    other, other_back = cast(right.transpose(1, 2), E4M3, by_row=True)
    made: Tensor = torch.ops.planner.narrow_runs_product(
        narrow, other.transpose(1, 2), back[:, 0], other_back[:, :, 0], ends, left.dtype
    )
    return made


def _summed_over_rows(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left.T [k, n] times right [n, m] of the rows of each run: [e, k, m]."""
    places = _places(ends, len(left))
    narrow, back = _cast_in_runs(left, places)
    other, other_back = _cast_in_runs(right, places)
    made: Tensor = torch.ops.planner.narrow_runs_product(
        narrow, other.t(), back, other_back, places.ends, left.dtype
    )
    return made


class _Places(NamedTuple):
    """Where rows lie if each run has whole tiles."""

    owner: Tensor
    """The run that each row is of; the number of runs behind the last."""
    row: Tensor
    """The place of each row."""
    ends: Tensor
    """Behind which place each run ends."""
    size: int
    """Places in all."""


def _places(ends: Tensor, num_rows: int) -> _Places:
    starts = torch.cat([ends.new_zeros(1), ends])
    in_tiles = (starts.diff() + (TILE - 1)) // TILE * TILE
    new_ends = in_tiles.cumsum(0, dtype=ends.dtype)
    shift = torch.cat([ends.new_zeros(1), new_ends]) - starts
    number = torch.arange(num_rows, device=ends.device)
    owner = torch.searchsorted(ends, number.to(ends.dtype), right=True)
    size = rows_in_tiles(num_rows, len(ends))
    return _Places(owner, number + shift[owner], new_ends, size)


def _cast_in_runs(x: Tensor, places: _Places) -> tuple[Tensor, Tensor]:
    """Return x.T [k, places] of x [n, k] in 8 bits, and what values of each run and row of it are
    to be multiplied by: [e, k].
    """
    num_runs = len(places.ends)
    top = x.new_zeros(num_runs + 1, x.shape[1])
    top.scatter_reduce_(0, places.owner[:, None].expand_as(x), x.abs(), "amax")
    scale = scale_for(top, E4M3)
    narrow = (x * scale.to(x.dtype)[places.owner]).to(E4M3)
    # (Copies of bytes: there are fewer kernels of 8-bit floats.)
    placed = narrow.new_zeros((places.size, x.shape[1]), dtype=torch.uint8)
    placed.index_copy_(0, places.row, narrow.view(torch.uint8))
    return placed.t().contiguous().view(E4M3), scale[:num_runs].reciprocal()


torch.library.define(
    "planner::narrow_runs_product",
    "(Tensor left, Tensor right, Tensor left_back, Tensor right_back, Tensor ends, "
    "ScalarType dtype) -> Tensor",
)
# left [n, k] by rows, right [e, k, m] by columns, left_back [n], right_back [e, m] -> [n, m]
# left [k, n] by rows, right [n, m] by columns, left_back [e, k], right_back [e, m] -> [e, k, m]


def _emulated(
    left: Tensor,
    right: Tensor,
    left_back: Tensor,
    right_back: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    made = left.new_zeros(_shape(left, right, ends), dtype=dtype)
    start = 0
    for run, end in enumerate(ends.tolist()):
        if right.dim() == 3:
            part = torch.mm(left[start:end].to(dtype), right[run].to(dtype))
            made[start:end] = (
                part * left_back[start:end, None].to(dtype) * right_back[run].to(dtype)
            )
        else:
            part = torch.mm(left[:, start:end].to(dtype), right[start:end].to(dtype))
            made[run] = part * left_back[run, :, None].to(dtype) * right_back[run].to(dtype)
        start = end
    return made


def _on_cuda(left: Tensor, *others: Any) -> Tensor:
    is_hopper = torch.cuda.get_device_capability(left.device)[0] == HOPPER
    return (_by_kernel if is_hopper else _emulated)(left, *others)


def _by_kernel(
    left: Tensor,
    right: Tensor,
    left_back: Tensor,
    right_back: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    if not left.numel():
        return left.new_zeros(_shape(left, right, ends), dtype=dtype)
    sums_over_rows = right.dim() == 2
    return torch._scaled_grouped_mm(
        left,
        right,
        left_back.flatten().contiguous(),
        right_back.flatten() if sums_over_rows else right_back.contiguous(),
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _fake(
    left: Tensor,
    right: Tensor,
    left_back: Tensor,
    right_back: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return left.new_empty(_shape(left, right, ends), dtype=dtype)


torch.library.impl("planner::narrow_runs_product", "CPU", _emulated)
torch.library.impl("planner::narrow_runs_product", "CUDA", _on_cuda)
torch.library.register_fake("planner::narrow_runs_product", _fake)


def _shape(left: Tensor, right: Tensor, ends: Tensor) -> tuple[int, ...]:
    shape = left.shape[0], right.shape[-1]
    return shape if right.dim() == 3 else (len(ends), *shape)
