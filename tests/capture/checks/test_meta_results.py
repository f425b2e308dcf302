"""Kept results of ops on meta tensors are what the kernels return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.capture.checks.on_meta.meta_results import MetaResults


class _Noted(TorchDispatchMode):
    """Notes what each op returns; entered inside, it sees kept results too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        parts = tree_leaves(made)
        self.made.append((func, *((t.shape, t.stride(), t.dtype, t.device) for t in parts)))
        return made


def _run(forward: Callable[[Tensor], Tensor]) -> list[tuple[Any, ...]]:
    with _Noted() as noted:
        forward(torch.empty(2, 6, 8, device="meta").transpose(1, 2).requires_grad_())
    return noted.made


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (x * 2 + x.sum(-1, keepdim=True)).to(torch.bfloat16) @ x.bfloat16().mT,
        lambda x: F.layer_norm(x, (6,)).max(dim=1).values,
        lambda x: torch.where(x > 0, x.int() / 2, torch.arange(6, device="meta")),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.5),
        lambda x: x.clone().add_(1).narrow(1, 2, 2).relu_(),
        lambda x: torch.cat([x[..., 3:], -x[..., :3]], dim=-1),
        lambda x: torch.complex(x, x).conj() * x,
    ],
)
def test_kept_results_are_the_kernels(forward: Callable[[Tensor], Tensor]) -> None:
    plain = _run(forward)
    with MetaResults():
        assert _run(forward) == plain
        assert _run(forward) == plain
        assert _run(lambda x: forward(x[:1])) == _run(lambda x: forward(x[:1]))


def test_equal_calls_run_a_kernel_once_and_share_nothing() -> None:
    calls = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.empty(2, 3, device="meta")
    with Kernels(), MetaResults():
        first, second = x + 1, x + 1
        assert calls.count(torch.ops.aten.add.Tensor) == 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        x.int() / 2  # the default dtype decides
        torch.set_default_dtype(torch.float64)
        try:
            assert (x.int() / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        x.add_(1), x.add_(1)  # a write is done each time
    assert calls.count(torch.ops.aten.add_.Tensor) == 2
