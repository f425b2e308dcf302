"""The loops over chunks of rows of a loss: what a chunk's logits leave, forward and backward.

A graph has each loop as an op of its own (``planner::numbers_in_chunks`` and
``planner::gradients_in_chunks``): unrolled, a compiler would order all chunks' logits, and might
hold them at once. The loops send no messages: those of a divided vocabulary are around them, where
a graph has them in its order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey

from planner.language.ops.families.losses.in_chunks import CAST

Steps = Sequence[Sequence[Any]]
"""Ops on logits: of each its target, and its arguments behind them."""


class Chunks(NamedTuple):
    """What the loops are told beside tensors."""

    transposed: bool
    """Whether the weight is [vocabulary, hidden]."""
    steps: Steps
    """What the model does to logits ahead of the loss."""
    ignore_index: int
    """A target that does not count."""
    smoothing: float
    """Label smoothing."""
    rows: int
    """Rows of a chunk."""
    first: int
    """The first entry of the vocabulary that this rank has."""
    num_classes: int
    """Entries that all ranks have together."""

    def spelled(self) -> str:
        """Return it as text, which a graph can hold; `read` is the inverse."""
        return json.dumps(self, default=lambda dtype: {"dtype": _name_of(dtype)})

    @classmethod
    def read(cls, text: str) -> Chunks:
        """Return what was spelled."""
        dtypes = lambda read: getattr(torch, read["dtype"])  # noqa: E731
        return cls(*json.loads(text, object_hook=dtypes))


def numbers(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunks: Chunks
) -> Tensor:
    """Return [4, rows], of this rank's logits: the largest, the sum of exponentials, the target's
    (0 on ranks that lack it), the sum of logits (where labels are smoothed); all but the target's
    less the largest. `rows` is [rows, hidden].
    """
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.planner.numbers_in_chunks(
            rows, weight, bias, labels, chunks.spelled()
        )
        return made
    return _loop_numbers(rows, weight, bias, labels, chunks)


def _loop_numbers(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunks: Chunks
) -> Tensor:
    found = rows.new_zeros((4, len(rows)), dtype=_wide(rows.dtype, chunks))
    largest, exponentials, at_targets, sums = found
    for start in range(0, len(rows), chunks.rows):
        chunk = slice(start, start + chunks.rows)
        logits = _stepped(_product(rows[chunk], weight, bias, chunks), chunks).to(found.dtype)
        local, is_here = _local(labels[chunk], weight, chunks)
        at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        at_targets[chunk] = at_target.masked_fill_(~is_here, 0)
        torch.amax(logits, -1, out=largest[chunk])
        logits.sub_(largest[chunk].unsqueeze(-1))
        if chunks.smoothing:
            torch.sum(logits, -1, out=sums[chunk])
        torch.sum(logits.exp_(), -1, out=exponentials[chunk])
        del logits
    return found


Needs = tuple[bool, bool, bool]
"""Whether rows, weight and bias need gradients."""


def gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    chunks: Chunks,
    needs: Needs,
    total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of rows, weight and bias, of those that need them.

    `normalizer` is the logarithm of each row's sum of exponentials, `scale` the gradient of its
    loss, 0 where it does not count. With a `total` the weight's gradient is added to that and not
    returned.
    """
    if torch.compiler.is_compiling():
        assert total is None
        made = torch.ops.planner.gradients_in_chunks(
            rows, weight, bias, labels, normalizer, scale, chunks.spelled(), list(needs)
        )
        each = iter(made)
        of_rows, of_weight, of_bias = (next(each) if need else None for need in needs)
        return of_rows, of_weight, of_bias
    return _loop_gradients(
        rows, weight, bias, labels, normalizer, scale, chunks, needs, total=total
    )


def _loop_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    chunks: Chunks,
    needs: Needs,
    total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    needs_rows, needs_weight, needs_bias = needs
    dx = torch.empty_like(rows) if needs_rows else None
    dw = total
    db = torch.zeros_like(bias) if needs_bias and bias is not None else None
    by_output = weight if chunks.transposed else weight.t()
    only_casts = all(target == CAST for target, *_ in chunks.steps)
    wide = normalizer.dtype
    for start in range(0, len(rows), chunks.rows):
        chunk = slice(start, start + chunks.rows)
        made = _product(rows[chunk], weight, bias, chunks)
        if only_casts:
            slopes, behind = _stepped(made, chunks).to(wide), None
            del made
        else:
            # Of other steps autograd has the gradients.
            with torch.enable_grad():
                behind = _stepped(made.requires_grad_(), chunks)
            slopes = behind.detach().to(wide, copy=True)
        slopes.sub_(normalizer[chunk].unsqueeze(-1)).exp_()
        if chunks.smoothing:
            slopes.sub_(chunks.smoothing / chunks.num_classes)
        local, is_here = _local(labels[chunk], weight, chunks)
        # On ranks without the target 0 is added to class 0.
        taken = is_here.to(wide).mul_(chunks.smoothing - 1)
        slopes.scatter_add_(-1, local.unsqueeze(-1), taken.unsqueeze(-1))
        slopes.mul_(scale[chunk].unsqueeze(-1))
        if behind is None:
            slopes = slopes.to(rows.dtype)
        else:
            (slopes,) = torch.autograd.grad(behind, made, slopes.to(behind.dtype))
            del behind, made
        if dx is not None:
            torch.mm(slopes, by_output, out=dx[chunk])
        if needs_weight:
            left, right = (slopes, rows[chunk]) if chunks.transposed else (rows[chunk], slopes)
            dw = torch.mm(left.t(), right) if dw is None else dw.addmm_(left.t(), right)
            del left, right
        if db is not None:
            db.add_(slopes.sum(0))
        del slopes
    return dx, dw if total is None else None, db


def dtype_behind(made: torch.dtype, steps: Steps) -> torch.dtype:
    """Return the dtype of logits behind all steps."""
    casts = (dtype for target, dtype, *_ in (step for step in steps if step[0] == CAST))
    return [made, *casts][-1]


def _wide(made: torch.dtype, chunks: Chunks) -> torch.dtype:
    return torch.promote_types(dtype_behind(made, chunks.steps), torch.float32)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> Tensor:
    """Return the logits of some rows as the product makes them."""
    if chunks.transposed:
        return torch._C._nn.linear(rows, weight, bias)
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def _stepped(made: Tensor, chunks: Chunks) -> Tensor:
    """Return what the model's steps make of them."""
    for target, *args in chunks.steps:
        made = _overload(target)(made, *args)
    return made


@cache
def _overload(target: str) -> Any:
    return attrgetter(target)(torch.ops)


def _local(labels: Tensor, weight: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return where targets lie among this rank's entries of the vocabulary, and which do."""
    local = labels - chunks.first
    num_local = weight.shape[0 if chunks.transposed else 1]
    is_here = (local >= 0) & (local < num_local) & (labels != chunks.ignore_index)
    return local.masked_fill_(~is_here, 0), is_here


def _name_of(dtype: Any) -> str:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a graph holds no step on logits with {dtype!r}")
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------- ops of graphs

_OPS = torch.library.Library("planner", "FRAGMENT")
_OPS.define(
    "numbers_in_chunks(Tensor rows, Tensor weight, Tensor? bias, Tensor labels, str chunks)"
    " -> Tensor"
)
_OPS.define(
    "gradients_in_chunks(Tensor rows, Tensor weight, Tensor? bias, Tensor labels, "
    "Tensor normalizer, Tensor scale, str chunks, bool[] needs) -> Tensor[]"
)


def _run_numbers(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunks: str
) -> Tensor:
    return _loop_numbers(rows, weight, bias, labels, Chunks.read(chunks))


def _run_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    chunks: str,
    needs: list[bool],
) -> list[Tensor]:
    of_rows, of_weight, of_bias = needs
    told = (Chunks.read(chunks), (of_rows, of_weight, of_bias))
    with _recording():
        made = _loop_gradients(rows, weight, bias, labels, normalizer, scale, *told)
    return [each for each in made if each is not None]


_AUTOGRAD = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradPrivateUse1,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
)


def _recording() -> Any:
    """Return a context in which autograd notes ops that it is told to, inside an op that a compiled
    graph calls: there dispatch is behind autograd.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _like_numbers(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunks: str
) -> Tensor:
    return rows.new_empty((4, len(rows)), dtype=_wide(rows.dtype, Chunks.read(chunks)))


def _like_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    chunks: str,
    needs: list[bool],
) -> list[Tensor]:
    of = zip((rows, weight, bias), needs, strict=True)
    return [torch.empty_like(each) for each, need in of if need and each is not None]


for _name, _run, _like in (
    ("numbers_in_chunks", _run_numbers, _like_numbers),
    ("gradients_in_chunks", _run_gradients, _like_gradients),
):
    _OPS.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner::{_name}", _like, lib=_OPS)

LOOPS: dict[Any, Callable[..., Any]] = {
    torch.ops.planner.numbers_in_chunks.default: _run_numbers,
    torch.ops.planner.gradients_in_chunks.default: _run_gradients,
}
"""What the ops do, for those who count what the loops hold: as ops they are one to look at."""
