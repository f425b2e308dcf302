"""AdamW for checks: dense gradients as ever, and sparse ones by touched rows, without decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime.state.tables import table_of


class AdamOfRows(torch.optim.AdamW):
    """AdamW over parameters with dense gradients and, as SparseAdam steps, with sparse ones.

    `verify` and dry runs train whatever the user's optimizers are: one that takes both.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
        **settings: Any,
    ) -> None:
        """Inside of `holding`, what is allocated is counted as the host's."""
        super().__init__(params, **settings)
        self._holding = holding

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step on all gradients."""
        rows = [
            (param, group, param.grad)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None and param.grad.is_sparse
        ]
        for param, _, _ in rows:
            param.grad = None
        super().step()
        for param, group, grad in rows:
            table = table_of(param)
            with self._holding() if table is not None and table.is_on_host else nullcontext():
                self._step_rows(param, group, grad.coalesce())
            param.grad = grad

    def _step_rows(self, param: Tensor, group: dict[str, Any], grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        numbers, values = grad.indices()[0], grad.values()
        (beta1, beta2), count = group["betas"], state["step"]
        mean = beta1 * state["exp_avg"][numbers] + (1 - beta1) * values
        square = beta2 * state["exp_avg_sq"][numbers] + (1 - beta2) * values.square()
        state["exp_avg"][numbers], state["exp_avg_sq"][numbers] = mean, square
        unbiased = (square / (1 - beta2**count)).sqrt() + group["eps"]
        param[numbers] -= group["lr"] / (1 - beta1**count) * mean / unbiased
