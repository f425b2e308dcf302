"""fp32 master copies of 16-bit parameters, and fp32 sums of their gradients.

bfloat16 has eight bits: a weight of 1 does not change by steps under 0.004, and a sum of
gradients stops growing; float16 has eleven, and the same happens a little later. So the optimizer
steps on fp32 copies, made from the model's own values, and each microbatch's gradient is added to
an fp32 sum as soon as autograd has it; the 16-bit gradient of one parameter at a time is all that
is alive of it. After the step the parameters are the copies, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from planner.language.graph import TensorMeta
from planner.language.plan import Precision, low_dtype


def rest_dtype(meta: TensorMeta, precision: Precision) -> torch.dtype:
    """Return the dtype in which a tensor is kept: fp32 for a parameter that a precision
    cast and that trains.
    """
    # (A complex parameter is not cast: 16-bit dtypes have no complex form that trains.)
    is_short = meta.dtype == low_dtype(precision)
    if is_short and meta.kind == "param" and meta.requires_grad:
        return torch.float32
    return getattr(torch, meta.dtype)


class MasterParams:
    """The fp32 copies for the parameters of one stage. Mutable: values and gradients.

    Has a stage's `named_params`, in which a copy stands for the parameter it is of.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
        """`values` gives, by the user's name, a parameter's fp32 value, which is taken over; one
        without is stepped on elsewhere.
        """
        self._named = dict(params)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for fqn, param in params.items():
            if not param.requires_grad or fqn not in values:
                continue
            # Under the user's name, so optimizer, sums and checkpoints meet the copy and not the
            # 16-bit weight.
            master = self._named[fqn] = nn.Parameter(values[fqn])
            self._pairs.append((param, master))
            # In the backward itself: the 16-bit gradient is freed before the next one is made.
            param.register_post_accumulate_grad_hook(partial(hand_over, master))

    def named_params(self) -> dict[str, nn.Parameter]:
        """Return the copies, and the parameters that do not train, by the user's names."""
        return dict(self._named)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies into the parameters."""
        if self._pairs:
            params, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(params, masters)


def hand_over(master: nn.Parameter, param: Tensor) -> None:
    """Add a parameter's gradient to that of its wider copy, and forget it."""
    grad, param.grad = param.grad, None
    if grad is None:
        return  # of a table, whose gradient of rows is elsewhere (`planner.runtime.state.tables`)
    if master.grad is None:
        master.grad = grad.to(master.dtype)
    else:
        master.grad += grad


def cast_params(tensors: Mapping[str, Tensor], metas: Iterable[TensorMeta]) -> dict[str, Tensor]:
    """Return tensors by name in the dtypes the programs take them in."""
    return {meta.name: tensors[meta.name].to(getattr(torch, meta.dtype)) for meta in metas}
