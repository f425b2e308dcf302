"""Custom autograd functions, kept as ops that run the user's own forward and backward.

torch.export runs the forward of a `torch.autograd.Function` and records the ops inside. Their
derivative would take the place of the function's own backward: a straight-through estimator
would train with zeros. So while a model is exported, a call of a function becomes one op,
``planner::autograd_function``, and what was called is noted beside. At training time the op
calls the class itself (`planner.runtime.stage.calls.autograd_functions`). No sharding rule looks
inside, so the op runs on whole tensors on every tp and cp rank.

Activation checkpointing written with a function of torch's own changes no number: its content
is captured, because what is recomputed is the plan's choice.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from planner.capture.diagnose import calling_line
from planner.errors import CaptureError
from planner.language.graph.function_keys import function_key

AutogradFunction = type[torch.autograd.Function]

_PLAIN = (
    types.NoneType,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_seen_through(function: AutogradFunction) -> bool:
    """Whether a function is torch's own and loses nothing when its content is captured.

    Checkpointing changes no number, module hooks are refused by themselves, and an operator of
    `torch.library` is an op already, with its own backward.
    """
    return (
        function in (CheckpointFunction, BackwardHookFunction)
        or function.__module__ == "torch._library.autograd"
    )


torch.library.define("planner::autograd_function", "(Tensor[] tensors, int call) -> Tensor[]")


@dataclass(kw_only=True)
class FunctionCall:
    """One call of a function: what it was given, and what its forward said of its results.

    Attributes:
        function: the class that was called.
        args: by position, tensors among them.
        line: the user's line, for messages.
        outputs: its results, tensors as they are; None until it has run.
        returns_tuple: whether it returned several, as a tuple.
        not_differentiable: positions of tensors among the results that have no gradient.
    """

    function: AutogradFunction
    args: tuple[Any, ...]
    line: str
    outputs: tuple[Any, ...] | None = None
    returns_tuple: bool = False
    not_differentiable: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """What the op calls, the same in every process."""
        return function_key(self.function)

    @property
    def described(self) -> str:
        """The function and the user's line, for messages."""
        return f"the autograd function {self.function.__qualname__}{self.line}"


class FunctionCalls:
    """The calls of one export, in order. Mutable: it grows while the model runs."""

    def __init__(self) -> None:
        self.calls: list[FunctionCall] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Turn calls of autograd functions inside into ops."""
        given = torch.autograd.Function.__dict__["apply"]

        def apply(cls: AutogradFunction, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                return _checkpointed(*args)
            if is_seen_through(cls):
                return given.__get__(None, cls)(*args, **kwargs)
            return self._call(cls, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()
            torch.autograd.Function.apply = given  # type: ignore[method-assign]

    def _call(self, function: AutogradFunction, args: tuple[Any, ...], kwargs: Any) -> Any:
        # Keywords are bound to places, because an op's arguments are recorded in order.
        if kwargs or _has_setup_context(function):
            bound = inspect.signature(function.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        call = FunctionCall(function=function, args=args, line=calling_line())
        _check(call)
        self.calls.append(call)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        made = iter(torch.ops.planner.autograd_function(tensors, len(self.calls) - 1))
        assert call.outputs is not None
        outputs = tuple(
            next(made) if isinstance(output, Tensor) else output for output in call.outputs
        )
        return outputs if call.returns_tuple else outputs[0]


@contextmanager
def checkpoints_inside() -> Iterator[None]:
    """Let what reentrant checkpoints run be seen by autograd, as it is where a plan trains it.

    Their node in autograd's graph leads to their inputs alone: parameters inside get their
    gradients when the backward runs the forward again.
    """
    given = torch.autograd.Function.__dict__["apply"]

    def apply(cls: AutogradFunction, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        return given.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = given  # type: ignore[method-assign]


def _checkpointed(run: Any, preserve_random_state: bool, *given: Any) -> Any:
    """Run what a reentrant checkpoint is of: without gradients where none of its inputs has one."""
    has_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in given)
    with nullcontext() if has_gradient else torch.no_grad():
        return run(*given)


_active: list[FunctionCalls] = []
_as_written = torch.autograd.Function.__dict__["apply"]


@contextmanager
def as_written() -> Iterator[None]:
    """Let functions inside run as their authors wrote them, though calls around are recorded."""
    recording = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = _as_written  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = recording  # type: ignore[method-assign]


@torch.library.register_fake("planner::autograd_function")
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    calls = _active[-1].calls
    made = _run_forward(calls[call], tensors)
    # An op's results are new: a function that returns its input would make them aliases.
    return [torch.empty_like(tensor) for tensor in made]


def _has_setup_context(function: AutogradFunction) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _check(call: FunctionCall) -> None:
    """Refuse what the op could not be given again at training time."""
    for value in call.args:
        leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
        for leaf in leaves:
            nested = isinstance(leaf, Tensor) and leaf is not value
            if nested or not isinstance(leaf, (*_PLAIN, Tensor)):
                what = "tensors inside a container" if nested else f"a {type(leaf).__name__}"
                raise CaptureError(
                    f"{call.described} is given {what}, which a plan can't hold; "
                    "pass tensors and numbers only, each as an argument of its own"
                )
    for method in (call.function.forward, call.function.backward, call.function.setup_context):
        code = getattr(inspect.unwrap(method), "__code__", None)
        cells = getattr(inspect.unwrap(method), "__closure__", None) or ()
        for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
            if not isinstance(
                cell.cell_contents,
                (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
            ):
                raise CaptureError(
                    f"{call.described} reads {name} of the function around it, which another "
                    "process can't find again; pass it as an argument"
                )


def _run_forward(call: FunctionCall, tensors: list[Tensor]) -> list[Tensor]:
    """Run the forward for the shapes of its results, and note what it says of them."""
    given = iter(tensors)
    args = [next(given) if isinstance(arg, Tensor) else arg for arg in call.args]
    context = _Context(call, tuple(isinstance(arg, Tensor) for arg in args))
    # As Function.apply runs it: a forward's own ops have no gradient, `backward` stands for them.
    with torch.no_grad(), _OwnArguments(call, tensors), _NoDraws(call):
        if _has_setup_context(call.function):
            result = call.function.forward(*args)
            call.function.setup_context(context, tuple(args), result)
        else:
            result = call.function.forward(context, *args)
    call.returns_tuple = isinstance(result, tuple)
    call.outputs = result if isinstance(result, tuple) else (result,)
    made = [output for output in call.outputs if isinstance(output, Tensor)]
    if not made:
        raise CaptureError(f"{call.described} returns no tensor; return what it computes")
    call.not_differentiable = frozenset(
        index
        for index, output in enumerate(made)
        if any(output is marked for marked in context.not_differentiable)
    )
    return made


@dataclass
class _Context:
    """Stands in for `ctx` while a forward runs for its shapes. Mutable: the forward sets it."""

    call: FunctionCall
    needs_input_grad: tuple[bool, ...]
    not_differentiable: list[Tensor] = field(default_factory=list)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable.extend(tensors)

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise CaptureError(
            f"{self.call.described} writes into its input (mark_dirty); return a new tensor"
        )

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes_grads = value


class _OwnArguments(TorchFunctionMode):
    """Refuses a forward that reads tensors it was not given."""

    def __init__(self, call: FunctionCall, given: list[Tensor]) -> None:
        super().__init__()
        self._call = call
        # By identity; the tensors are held so that an id stays its own.
        self._known = {id(tensor): tensor for tensor in given}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known:
                raise CaptureError(
                    f"{self._call.described} reads a tensor of shape {tuple(leaf.shape)} that is "
                    "none of its arguments; pass it to apply(), so that a plan can place it"
                )
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf
        return result


class _NoDraws(TorchDispatchMode):
    """Refuses random draws, which ranks that hold replicas could not be made to repeat."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs):
            raise CaptureError(
                f"{self._call.described} draws random numbers ({func}); draw them outside, and "
                "pass them as an argument"
            )
        return func(*args, **(kwargs or {}))


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an op draws random numbers: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = func._schema.arguments
    given = {each.name: each.default_value for each in names}
    given |= dict(zip(given, args, strict=False)) | (kwargs or {})
    return given.get("dropout_p") != 0.0
