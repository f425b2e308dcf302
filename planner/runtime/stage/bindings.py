"""The quickest way to call an ATen operator from Python.

Calling an overload object (``torch.ops.aten.add.Tensor``) goes through generic argument
conversion, some 3 us more than the generated binding (``torch.add``) that ends in the same
operator. On a CPU, or on a GPU waiting for Python, that is several percent of a
small layer. Only bindings that take the operator's own arguments, in its own order and with its own
defaults, are
listed; others are called as overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_IN_TORCH = (
    "add.Tensor",
    "addmm.default",
    "bmm.default",
    "cat.default",
    "clone.default",
    "cos.default",
    "div.Tensor",
    "dropout.default",
    "embedding.default",
    "exp.default",
    "layer_norm.default",
    "matmul.default",
    "mean.dim",
    "mm.default",
    "mul.Tensor",
    "neg.default",
    "permute.default",
    "pow.Tensor_Scalar",
    "relu.default",
    "rms_norm.default",
    "rsqrt.default",
    "select.int",
    "sigmoid.default",
    "sin.default",
    "softmax.int",
    "sub.Tensor",
    "t.default",
    "tanh.default",
    "transpose.int",
    "unsqueeze.default",
)
_IN_NN = (
    "gelu.default",
    "linear.default",
    "scaled_dot_product_attention.default",
    "silu.default",
)
_METHODS = (
    "contiguous.default",
    "expand.default",
    "reshape.default",
    "to.dtype",
    "view.default",
)


def _bindings() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for names, owner in ((_IN_TORCH, torch), (_IN_NN, torch._C._nn), (_METHODS, Tensor)):
        found |= {f"aten.{name}": getattr(owner, name.split(".")[0]) for name in names}
    return found


BINDINGS = _bindings()
"""Generated bindings by target; each is the same operator as the overload of that name."""
