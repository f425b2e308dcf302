"""Precision "bf16": the model as it computes with bfloat16 parameters and activations.

Parameters are cast; buffers (running statistics, rotary frequencies) and batch tensors
(regression targets) keep their dtype. Where that brings two dtypes together, calls are
written out as `torch.autocast` would decide them:

    products, convolutions, attention, norms    all operands in bfloat16
    batch norm                                  weight and bias in float32, as its statistics
    loss functions                              operands in float32, so the loss is float32

Everything else follows PyTorch's type promotion, and casts written in the model stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

LOW = torch.bfloat16

_ONE_DTYPE = frozenset(
    [
        "linear",
        "bilinear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "scaled_dot_product_attention",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "instance_norm",
    ]
)
"""Names of functions whose kernels take one floating dtype."""

_LOSSES = frozenset(
    (
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.poisson_nll_loss,
        F.gaussian_nll_loss,
        F.soft_margin_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.margin_ranking_loss,
        F.hinge_embedding_loss,
        F.cosine_embedding_loss,
        F.triplet_margin_loss,
        F.ctc_loss,
    )
)


def cast_parameters(module: nn.Module) -> nn.Module:
    """Cast a module's floating parameters in place; returns it."""
    for param in module.parameters():
        if param.is_floating_point():
            param.data = param.data.to(LOW)
    return module


class MixedDtypes(TorchFunctionMode):
    """Runs a cast model, bringing the operands of a call to one dtype where it needs one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with its operands cast."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = _cast((args, kwargs), torch.float32)
        elif func is F.batch_norm:
            args, kwargs = _batch_norm(*args, **kwargs)
        elif getattr(func, "__name__", "") in _ONE_DTYPE:
            operands = tree_flatten((args, kwargs))[0]
            dtypes = {x.dtype for x in operands if _is_float(x)}
            if len(dtypes) > 1 and LOW in dtypes:
                args, kwargs = _cast((args, kwargs), LOW)
        return func(*args, **kwargs)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if running_mean is not None and running_mean.dtype != x.dtype:
        weight, bias = _cast((weight, bias), running_mean.dtype)
    return (x, running_mean, running_var, weight, bias, *rest), more


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_float(x) and x.dtype != dtype else x, values)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
