"""Both sides of `verify` in fp64 without dropout: the captured graph, and the user's module.

Casts written into a model (``.to(torch.float32)``, ``softmax(dtype=…)``, the upcasts of
norms and rotary tables) would round fp64 to fp32 and hide differences under 1e-7, so they
are promoted: in the graph by rewriting its dtypes, in the module by a function mode that
rewrites the dtype arguments of the calls it makes. The two share nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner.graph import Arg, ModelGraph, Op, Program, Symbol, TensorMeta

_LOW = {"float32", "bfloat16", "float16"}
_LOW_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

# Position of the dropout probability in the arguments of each op that has one.
_DROPOUT_ARG = {"dropout": 1, "alpha_dropout": 1, "feature_dropout": 1, "native_dropout": 1}
_SDPA = "scaled_dot_product_attention"


def promote_graph(graph: ModelGraph) -> ModelGraph:
    """Return the graph with every floating dtype fp64 and every dropout probability zero."""
    return replace(
        graph,
        tensors=_promote_tensors(graph.tensors),
        preamble=_promote_program(graph.preamble),
        classes=tuple(map(_promote_program, graph.classes)),
    )


def has_dropout(graph: ModelGraph) -> bool:
    """Whether any op of the graph drops at random."""
    return any(op != _without_dropout(op) for program in graph.classes for op in program.ops)


def _promote_program(program: Program) -> Program:
    return replace(
        program,
        tensors=_promote_tensors(program.tensors),
        ops=tuple(
            _in_fp64(
                _without_dropout(
                    replace(op, args=_promote_arg(op.args), kwargs=_promote_arg(op.kwargs))
                )
            )
            for op in program.ops
        ),
    )


def _promote_tensors(tensors: Iterable[TensorMeta]) -> tuple[TensorMeta, ...]:
    return tuple(replace(t, dtype="float64") if t.dtype in _LOW else t for t in tensors)


def _promote_arg(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_promote_arg, arg))
    if isinstance(arg, Symbol) and arg.kind == "dtype" and arg.value in _LOW:
        return Symbol("dtype", "float64")
    return arg


def _in_fp64(op: Op) -> Op:
    """The op, or one that does the same where the library's kernels stop at fp32."""
    if op.target == "aten._grouped_mm.default":
        return replace(op, target="planner.grouped_mm", args=op.args[:3], kwargs=())
    return op


def _without_dropout(op: Op) -> Op:
    packet = op.target.split(".")[1]
    if packet in _DROPOUT_ARG:
        return _with_arg(op, _DROPOUT_ARG[packet], "p", 0.0)
    if packet == _SDPA:
        return _with_arg(op, 4, "dropout_p", 0.0)
    return op


def _with_arg(op: Op, position: int, name: str, value: Arg) -> Op:
    if len(op.args) > position:
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=tuple((k, value if k == name else v) for k, v in op.kwargs))


class ReferenceMode(TorchFunctionMode):
    """Runs unmodified code in fp64: casts to shorter floats give fp64, dropout keeps all."""

    _CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
    _DROPOUTS = (
        F.dropout,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with dtypes promoted and dropout off."""
        kwargs = {key: self._promoted(value) for key, value in (kwargs or {}).items()}
        args = tuple(map(self._promoted, args))
        if func in self._CASTS:
            return args[0].double()
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _promoted(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in _LOW_DTYPES else value


def _grouped_mm(
    rows: Tensor, weights: Tensor, *, offs: Tensor, bias: None = None, out_dtype: None = None
) -> Tensor:
    """Multiply each run of rows by its own matrix; the library's kernels stop at fp32.

    `rows` is [n, k], `weights` [groups, k, m]; `offs` holds where each group's rows end.
    """
    assert bias is None
    assert out_dtype is None
    ends = offs.tolist()
    runs = zip([0, *ends[:-1]], ends, weights, strict=True)
    return torch.cat([rows[start:end] @ weight for start, end, weight in runs])
