"""Precisions "bf16" and "fp16": the model with parameters and activations in 16 bits.

Parameters are cast; buffers (running statistics, rotary frequencies) and batch tensors
(regression targets) keep their dtype. Where that brings two dtypes together, calls are
written out as `torch.autocast` would decide them:

    products, convolutions, attention, norms    all operands in the 16-bit dtype
    recurrent layers                            all operands in the 16-bit dtype
    batch norm                                  weight and bias in the dtype of its statistics
    kernels of one dtype beside products        all operands in the widest dtype among them
    loss functions                              operands in float32, so the loss is float32

Everything else follows PyTorch's type promotion, and casts written in the model stay. Writes in
place (`index_add_`) are left as they are: what they write into has a dtype of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from planner.language.plan.parts import Precision, low_dtype

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
        "addbmm",
        "addmv",
        "vecdot",
        "linalg_vecdot",
        "linalg_matmul",
        "linalg_multi_dot",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "prelu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "instance_norm",
    ]
)
"""Names of functions that compute in the 16-bit dtype where operands differ.

A function written in Python (`multi_head_attention_forward`) stands here beside the products in
it: a function mode does not see the calls inside one.
"""

_WIDEST_DTYPE = frozenset(
    [
        "dot",
        "vdot",
        "inner",
        "tensordot",
        "cross",
        "linalg_cross",
        "cdist",
        "lerp",
        "grid_sample",
        "index_put",
        "index_add",
        "index_copy",
        "scatter_add",
        "masked_scatter",
    ]
)
"""Names of functions whose kernels take one dtype, and that gain nothing from a short one."""

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


def cast_parameters(module: nn.Module, precision: Precision) -> nn.Module:
    """Cast a module's floating parameters in place to what a precision holds; returns it.

    Recurrent layers get their inputs cast by a hook: they compare dtypes before they call a kernel.
    """
    if not low_dtype(precision):
        return module
    dtype = getattr(torch, low_dtype(precision))
    for param in module.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.register_forward_pre_hook(
                lambda _, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True
            )
    return module


def mixed_dtypes(precision: Precision) -> AbstractContextManager[Any]:
    """Inside, a model that `cast_parameters` cast computes as autocast would; any other as ever."""
    dtype = low_dtype(precision)
    return MixedDtypes(getattr(torch, dtype)) if dtype else nullcontext()


class MixedDtypes(TorchFunctionMode):
    """Runs a cast model, bringing the operands of a call to one dtype where it needs one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with its operands cast."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = _cast((args, kwargs), torch.float32)
        elif func is F.batch_norm:
            args, kwargs = _batch_norm(*args, **kwargs)
        elif (name := getattr(func, "__name__", "")) in _ONE_DTYPE | _WIDEST_DTYPE:
            operands = tree_flatten((args, kwargs))[0]
            dtypes = {x.dtype for x in operands if _is_float(x)}
            if len(dtypes) > 1 and self._dtype in dtypes:
                # (torch.promote_types would be traced as an op of the model.)
                widest = max(dtypes, key=lambda dtype: dtype.itemsize)
                args, kwargs = _cast((args, kwargs), self._dtype if name in _ONE_DTYPE else widest)
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
    # Kernels take an input in 16 bits with all else in float32, or one dtype for all.
    statistics = x if running_mean is None else running_mean
    weight, bias = _cast((weight, bias), statistics.dtype)
    return (x, running_mean, running_var, weight, bias, *rest), more


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_float(x) and x.dtype != dtype else x, values)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
