"""Both sides of `verify` in fp64 without dropout: the captured graph, and the user's module.

Casts written into a model (``.to(torch.float32)``, ``softmax(dtype=…)``, the upcasts of
norms, rotary tables in complex64) would round fp64 to fp32 and hide differences under 1e-7,
so they are promoted: in the graph by rewriting its dtypes, in the module by promoting the
tensors it holds, and by a function mode that rewrites the dtypes in the calls it makes. The
two share nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from planner.errors import ModelError
from planner.language.graph import Arg, ModelGraph, Op, Program, Symbol, TensorMeta
from planner.language.ops.families.products.matmul import GROUPED_MM
from planner.language.ops.families.products.narrow import plain_op
from planner.language.ops.record import is_random

_WIDE = {
    "float32": "float64",
    "bfloat16": "float64",
    "float16": "float64",
    "complex64": "complex128",
    "complex32": "complex128",
}
# Where memory stops at fp32 (`planner.runtime.proofs.by_block`).
_AT_LEAST_FP32 = {"bfloat16": "float32", "float16": "float32", "complex32": "complex64"}
_WIDE_DTYPES = {getattr(torch, low): getattr(torch, high) for low, high in _WIDE.items()}

# Position of the dropout probability in the arguments of each op that has one.
_DROPOUT_ARG = {
    "dropout": (1, "p"),
    "alpha_dropout": (1, "p"),
    "feature_dropout": (1, "p"),
    "feature_alpha_dropout": (1, "p"),
    "native_dropout": (1, "p"),
    "scaled_dot_product_attention": (4, "dropout_p"),
    "lstm": (5, "dropout"),
    "gru": (5, "dropout"),
    "rnn_tanh": (5, "dropout"),
    "rnn_relu": (5, "dropout"),
}


def promote_graph(graph: ModelGraph, *, to: str = "float64") -> ModelGraph:
    """Return the graph with every floating dtype fp64 and every dropout probability zero.

    With `to` "float32" shorter dtypes become fp32 and the others stay.
    """
    wide = _WIDE if to == "float64" else _AT_LEAST_FP32
    return replace(
        graph,
        tensors=_promote_tensors(graph.tensors, wide),
        preamble=_promote_program(graph.preamble, wide),
        classes=tuple(_promote_program(program, wide) for program in graph.classes),
        whole=graph.whole
        and replace(graph.whole, program=_promote_program(graph.whole.program, wide)),
    )


def has_dropout(graph: ModelGraph) -> bool:
    """Whether any op of the graph drops at random."""
    return any(op != _without_dropout(op) for program in graph.classes for op in program.ops)


def drawing_ops(graph: ModelGraph) -> tuple[str, ...]:
    """Return the ops that draw random numbers, dropout left out, as ``name in block``."""
    found = (
        f"{op.target.split('.')[1]} in {block.name}"
        for block in graph.blocks
        for op in graph.classes[block.class_index].ops
        if is_random(op) and op.target.split(".")[1] not in _DROPOUT_ARG
    )
    return tuple(dict.fromkeys(found))


def _promote_program(program: Program, wide: Mapping[str, str]) -> Program:
    return replace(
        program,
        tensors=_promote_tensors(program.tensors, wide),
        ops=tuple(
            _in_fp64(
                _without_dropout(
                    replace(
                        op,
                        args=_promote_arg(op.args, wide),
                        kwargs=_promote_arg(op.kwargs, wide),
                    )
                )
            )
            for op in program.ops
        ),
    )


def _promote_tensors(
    tensors: Iterable[TensorMeta], wide: Mapping[str, str]
) -> tuple[TensorMeta, ...]:
    return tuple(replace(t, dtype=wide.get(t.dtype, t.dtype)) for t in tensors)


def _promote_arg(arg: Any, wide: Mapping[str, str]) -> Any:
    if isinstance(arg, tuple):
        return tuple(_promote_arg(item, wide) for item in arg)
    if isinstance(arg, Symbol) and arg.kind == "dtype":
        return Symbol("dtype", wide.get(arg.value, arg.value))
    return arg


def _in_fp64(op: Op) -> Op:
    """The op, or one that does the same where kernels stop at fp32, or cast to 8 bits."""
    op = plain_op(op)
    if op.target == "aten._grouped_mm.default":
        return replace(op, target=GROUPED_MM, args=op.args[:3], kwargs=())
    return op


def _without_dropout(op: Op) -> Op:
    packet = op.target.split(".")[1]
    return _with_arg(op, *_DROPOUT_ARG[packet], 0.0) if packet in _DROPOUT_ARG else op


def _with_arg(op: Op, position: int, name: str, value: Arg) -> Op:
    if len(op.args) > position:
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=tuple((k, value if k == name else v) for k, v in op.kwargs))


def in_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor in fp64 or complex128 if it is of a shorter such type, else itself."""
    return tensor.to(_WIDE_DTYPES.get(tensor.dtype, tensor.dtype))


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module holds by name: parameters, all buffers, and plain attributes.

    Attributes may be lists, tuples or dicts of tensors. A tensor of several names has each.
    """
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found.update(_tensors_in(value, f"{path}.{key}" if path else key))
    return found


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors_in(item, f"{path}.{key}")


def promote_module(module: nn.Module, values: nn.Module | None = None) -> None:
    """Put what a module holds in fp64 or complex128, in place, with the values of `values`.

    Each tensor stays the object it is, with its hooks. Raises ModelError where `values`,
    another module of the same function, holds other tensors, or the same ones.
    """
    held = held_tensors(module)
    given = held if values is None else held_tensors(values)
    shapes, others = ({n: t.shape for n, t in tensors.items()} for tensors in (held, given))
    if shapes != others:
        differing = sorted(n for n in shapes.keys() | others if shapes.get(n) != others.get(n))
        raise ModelError(
            f"model() called twice makes models that differ in {', '.join(differing[:3])}; verify "
            "trains one beside the other, so let model() make the same model each time"
        )
    if values is not None and any(
        isinstance(tensor, nn.Parameter) and given[name] is tensor for name, tensor in held.items()
    ):
        raise ModelError(
            "model() called twice returns the same parameters; verify trains one model beside "
            "another, so build the model inside model()"
        )
    for name, tensor in held.items():
        value = in_fp64(given[name].detach())
        tensor.data = value.clone() if values is not None else value


class ReferenceMode(TorchFunctionMode):
    """Runs unmodified code in fp64: casts to shorter types give fp64, dropout keeps all.

    `own` is the dtype that the model's fp64 stands for, whose limits `torch.finfo` gives;
    `numbers` the one that Python's numbers become, and are rounded to, as in the capture.
    """

    _CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
    _COMPLEX_CASTS = tuple(getattr(torch.Tensor, name) for name in ("cfloat", "chalf"))
    _FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
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
    # Functions that drop on the way, with the position of the probability.
    _DROPPING: ClassVar[dict[Any, tuple[int, str]]] = {
        F.scaled_dot_product_attention: (4, "dropout_p"),
        F.multi_head_attention_forward: (10, "dropout_p"),
    }
    _RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

    def __init__(
        self, own: torch.dtype = torch.float32, numbers: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._own, self._numbers = own, numbers
        self._finfo: Callable[..., Any] = torch.finfo

    def __enter__(self) -> ReferenceMode:
        """Begin; `torch.finfo` is no function that a mode sees, so it stands in meanwhile."""
        given = self._finfo = torch.finfo
        stands_for = {torch.float64: self._own, torch.complex128: self._own}

        def finfo(dtype: torch.dtype | None = None) -> torch.finfo:
            dtype = dtype or self._numbers
            return given(stands_for.get(dtype, dtype))

        torch.finfo = finfo  # type: ignore[assignment, misc]
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """End it."""
        torch.finfo = self._finfo  # type: ignore[assignment, misc]
        super().__exit__(*failure)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with dtypes promoted and dropout off."""
        kwargs = kwargs or {}
        if func in self._FROM_DATA:
            return self._from_data(func, args, kwargs)
        change = _promoted_dtype if _writes(func) else _promoted
        kwargs = {key: change(value) for key, value in kwargs.items()}
        args = tuple(map(change, args))
        if func in self._CASTS:
            return args[0].double()
        if func in self._COMPLEX_CASTS:
            return args[0].cdouble()
        if func is torch.Tensor.type and len(args) > 1:
            args = (args[0], _promoted_dtype(_dtype_of_type(args[1])))
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in self._DROPPING:
            position, name = self._DROPPING[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        if func in self._RECURRENT:  # …, has_biases, num_layers, dropout, …
            # The number of states and weights ahead of `has_biases` differs by call.
            position = next(i for i, arg in enumerate(args) if isinstance(arg, bool)) + 2
            args = (*args[:position], 0.0, *args[position + 1 :])
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)

    def _from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Numbers are rounded as the model would round them, and then promoted."""
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[-1:], kwargs))):
            kwargs = {key: _promoted(value) for key, value in kwargs.items()}
            return func(*map(_promoted, args), **kwargs)
        if func is torch.Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if kwargs.get("dtype") is torch.float64 and not _is_told_float64(sys._getframe(2)):
            kwargs = {**kwargs, "dtype": self._own}
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._numbers)
        try:
            return in_fp64(func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)


def _is_told_float64(caller: FrameType) -> bool:
    """Whether code names fp64 itself; else it has the dtype from a tensor, where fp64 stands for
    the model's own.
    """
    return not {"float64", "double"}.isdisjoint(caller.f_code.co_names)


def _writes(func: Any) -> bool:
    """Whether a function changes a tensor in place, or an attribute of it."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith(("__i", "__set")) or name == "__get__"
    return name.endswith("_")


def _promoted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return in_fp64(value)
    if type(value) in (list, tuple):
        return type(value)(map(_promoted, value))
    return _promoted_dtype(value)


def _promoted_dtype(value: Any) -> Any:
    return _WIDE_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


def _dtype_of_type(kind: Any) -> Any:
    """Return the dtype of what ``Tensor.type`` takes: a dtype, a tensor type or its name."""
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        kind = getattr(torch.cuda if module.endswith("cuda") else torch, name, kind)
    return getattr(kind, "dtype", kind)


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
