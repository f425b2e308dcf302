"""Ops in the place of calls of modules, and of functions, that no graph can hold.

A class's forward is replaced by an attribute. A function may be held anywhere (a table of losses,
another file's names), so it is its code that is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import _AttrProxy, get_proxy_mode
from torch.utils._pytree import tree_unflatten

from planner.capture.align import BATCH_SIZES
from planner.capture.branches import Branches
from planner.capture.diagnose import (
    calling_line,
    causes,
    depends_on_values,
    is_users,
    user_line,
)
from planner.capture.loops.tracing import Course, NotALoop, traced
from planner.capture.opaque.calls import SEEDS, tensors_of
from planner.capture.opaque.functions import CalledFunction, function_of
from planner.capture.opaque.trial import SCALARS, ModuleCall, NotHeld, Place, Trial
from planner.language.graph.module_keys import module_key, name_of
from planner.language.plan import Precision

torch.library.define("planner::opaque_module", "(Tensor[] tensors, int call) -> Tensor[]")


@dataclass(kw_only=True)
class OpaqueModules:
    """The classes and functions that a capture keeps as ops, and their calls. Mutable: all grow.

    Attributes:
        precision: that the model is captured in.
        branches: that its forward takes where it tests whether a compiler runs.
        unit: samples that belong together, of which batches have so many.
        calls: each once, however often it is made; ops name them by their number.
        loops: classes whose forward is traced as a loop over experts (`planner.capture.loops`),
            before they are ops, and its course.
        not_loops: those of which that failed, and why.
    """

    precision: Precision = "model"
    branches: Branches = field(default_factory=Branches)
    unit: int = 1
    calls: list[ModuleCall] = field(default_factory=list)
    loops: dict[type[nn.Module], Course] = field(default_factory=dict)
    not_loops: dict[type[nn.Module], str] = field(default_factory=dict)
    _forwards: dict[type[nn.Module], Callable[..., Any]] = field(default_factory=dict)
    _inherits: set[type[nn.Module]] = field(default_factory=set)
    """Those of these classes that have no forward of their own."""
    _codes: dict[FunctionType, CodeType] = field(default_factory=dict)
    _because: dict[type[nn.Module] | FunctionType, str] = field(default_factory=dict)
    """Where the forward of each depends on values."""
    _known: dict[Any, int] = field(default_factory=dict)
    _in_order: list[int] = field(default_factory=list)
    """Numbers of the calls of the last forward of the smaller batch."""
    _checked: set[str] = field(default_factory=set)
    """Keys of modules whose loops took one course for any number of rows."""
    _position: int = 0
    _num_samples: int = BATCH_SIZES[0]

    @property
    def keeps_any(self) -> bool:
        """Whether any class or function is kept as an op."""
        return bool(self._forwards or self._codes)

    def add_from(self, error: BaseException, model: nn.Module) -> bool:
        """Add the class of the innermost module in whose forward an error was raised that values,
        or what a smaller module gives, brought about. Where there is none below the model itself
        that is not added already, add the innermost function that this called; False where there
        is none, either.
        """
        for cause in causes(error):
            if isinstance(cause, NotALoop) and self.not_a_loop({cause.kind}, cause.why):
                return True
        if not depends_on_values(error) and not any(isinstance(e, NotHeld) for e in causes(error)):
            return False
        kinds = {type(part) for part in model.modules()} - {type(model)}
        modules, functions = _calls_in(error)
        for module in reversed(modules):
            kind = type(module)
            if kind in kinds and kind not in self._forwards:
                self._forwards[kind] = kind.forward
                self._because[kind] = self._reason(error)
                if depends_on_values(error):
                    self.loops[kind] = Course()
                return True
        for function in reversed(functions):
            if function not in self._codes:
                self._codes[function] = function.__code__
                self._because[function] = self._reason(error)
                return True
        return False

    def not_a_loop(self, kinds: Collection[type[nn.Module]], why: str) -> bool:
        """Have modules of these classes run as they are; False where none was a loop so far."""
        found = [kind for kind in self.loops if kind in kinds]
        for kind in found:
            del self.loops[kind]
            self.not_loops[kind] = why
        return bool(found)

    def _reason(self, error: BaseException) -> str:
        inner = next(reversed(self._because.values()), "")  # else: that can't be an op
        return user_line(error) if depends_on_values(error) else inner

    @contextmanager
    def as_ops(self, num_samples: int = BATCH_SIZES[0]) -> Iterator[None]:
        """Turn calls of these modules inside, in the forward of a batch, into ops."""
        _active.append(self)
        self._num_samples, self._position = num_samples, 0
        if num_samples == BATCH_SIZES[0]:
            self._in_order.clear()
        try:
            self._put_in_place()
            yield
        finally:
            self._put_back()
            _active.pop()

    def _replaced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = _as_users(module)
            if type(own) in self.loops:
                known, key = self.loops[type(own)], module_key(own)
                made, self.loops[type(own)] = traced(
                    partial(forward, module),
                    type(own),
                    args,
                    kwargs,
                    known,
                    is_checked=key in self._checked,
                )
                if get_proxy_mode() is None:
                    self._checked.add(key)
                return made
            return self._call(own, args, kwargs)

        run.__wrapped__ = forward  # type: ignore[attr-defined] # whose source is read
        return run

    def _put_in_place(self) -> None:
        self._inherits = {kind for kind in self._forwards if "forward" not in vars(kind)}
        for kind, forward in self._forwards.items():
            kind.forward = self._replaced(forward)
        for index, function in enumerate(self._codes):
            function.__code__ = _code_that_calls(index)

    def _put_back(self) -> None:
        for kind, forward in self._forwards.items():
            if kind in self._inherits:
                # Left there it would be code of the class, which names its modules.
                del kind.forward
            else:
                kind.forward = forward
        for function, code in self._codes.items():
            function.__code__ = code

    def function(self, index: int) -> CalledFunction:
        """Return one of the functions, in the order in which they were added."""
        return CalledFunction([*self._codes][index])

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named: tuple[Any, ...] = type(module).__mro__
        course = "whose forward"
        if isinstance(module, CalledFunction):
            named, course = (module.function,), "which"
        because = next((self._because[each] for each in named if each in self._because), "")
        who = f"{name_of(module)}{calling_line()}, {course} depends on values{because}"
        given: list[Tensor] = []

        def placed(value: Any) -> Any:
            if isinstance(value, Tensor):
                given.append(value)
                return Place(len(given) - 1)
            if type(value) in (list, tuple):
                return tuple(placed(item) for item in value)
            if isinstance(value, SCALARS):
                return value
            raise NotHeld(
                f"{who}, is given a {type(value).__name__}, which "
                "a plan can't hold; pass tensors and numbers only"
            )

        places = placed(args), tuple((name, placed(value)) for name, value in kwargs.items())
        number = self._number_of(module, who, places, given)
        call = self.calls[number]
        if call.num_given > len(given):
            given.append(torch.randint(SEEDS, (1,)))  # an op of its own
        made = iter(torch.ops.planner.opaque_module([*given, *tensors_of(module)], number))
        leaves, spec = call.structure
        return tree_unflatten([next(made) if leaf is Tensor else leaf for leaf in leaves], spec)

    def _number_of(self, module: nn.Module, who: str, places: Any, given: list[Tensor]) -> int:
        """Return the number of a call, tried if it is a new one."""
        self._put_back()
        try:
            key = module_key(module)
            told = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in given)
            dtypes = tuple((t.dtype, t.requires_grad) for t in tensors_of(module))
            known = (key, places, told, dtypes, self._num_samples)
            is_smaller = self._num_samples == BATCH_SIZES[0]
            if known not in self._known:
                first = None
                if not is_smaller and self._position < len(self._in_order):
                    # Both batch sizes make the same calls in the same order; of the larger only
                    # shapes are new, so its costs are those of the smaller.
                    first = self.calls[self._in_order[self._position]]
                trial = Trial(
                    module=module,
                    precision=self.precision,
                    who=who,
                    key=key,
                    places=places,
                    given=given,
                    num_samples=self._num_samples,
                    unit=self.unit,
                    first=first,
                )
                self.calls.append(trial.run())
                self._known[known] = len(self.calls) - 1
            number = self._known[known]
        finally:
            self._put_in_place()
        self._position += 1
        if is_smaller:
            self._in_order.append(number)
        return number


_active: list[OpaqueModules] = []


@torch.library.register_fake("planner::opaque_module")
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty(result.shape, dtype=result.dtype, device="meta")
        if tensors[0].is_meta
        else tensors[0].new_empty(result.shape, dtype=result.dtype)
        for result in _active[-1].calls[call].results
    ]


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.shapes = [(tensor.shape, tensor.dtype, tensor.is_floating_point()) for tensor in inputs[0]]


def _shaped_gradients(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    return [
        grads[0].new_empty(shape, dtype=dtype) if is_float else None
        for shape, dtype, is_float in ctx.shapes
    ], None


torch.library.register_autograd(
    "planner::opaque_module", _shaped_gradients, setup_context=_keep_shapes
)


def called_function(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a call of a function that is an op; what its code is while a capture runs."""
    return _active[-1]._call(_active[-1].function(index), args, kwargs)


@cache
def _code_that_calls(index: int) -> CodeType:
    """Return code for a function of any file that calls `called_function`."""
    names: dict[str, Any] = {}
    text = f"from {__name__} import called_function\n return called_function({index}, args, kwargs)"
    exec(f"def call(*args, **kwargs):\n {text}", names)
    code: CodeType = names["call"].__code__
    return code


def _as_users(module: nn.Module) -> nn.Module:
    """Return a module as the user made it: where any part is in several places, torch's tracer
    hands out parts of classes of its own, by which it tells where an op is.
    """
    if not isinstance(module, _AttrProxy):
        return module
    of_proxy: Any = module  # (`get_base` is of its subclass.)
    base: nn.Module = of_proxy.get_base()
    return base


def _calls_in(error: BaseException) -> tuple[list[nn.Module], list[FunctionType]]:
    """Return the modules in whose forward an error was first raised, and the functions that the
    innermost of them called, the outermost first.
    """
    for cause in reversed([*causes(error)]):
        modules, functions = _calls_on(cause.__traceback__)
        if modules:  # else it was being handled already when the capture began
            return modules, functions
    return [], []


def _calls_on(trace: TracebackType | None) -> tuple[list[nn.Module], list[FunctionType]]:
    modules: list[nn.Module] = []
    functions: list[FunctionType] = []
    while trace is not None:
        frame = trace.tb_frame
        code, local = frame.f_code, frame.f_locals
        module = local.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and code.co_name == "forward":
            modules.append(_as_users(module))
            functions.clear()
        elif modules and is_users(code.co_filename) and all(map(_is_held, _given(code, local))):
            function = function_of(code, frame.f_globals)
            functions += [] if function is None else [function]
        trace = trace.tb_next
    return modules, functions


def _given(code: CodeType, local: dict[str, Any]) -> Iterator[Any]:
    """Yield what a function was given, as far as its own names have it still."""
    num_named = code.co_argcount + code.co_kwonlyargcount
    yield from (local.get(name) for name in code.co_varnames[:num_named])
    others = iter(code.co_varnames[num_named:])
    if code.co_flags & CO_VARARGS:
        yield from local.get(next(others), ())
    if code.co_flags & CO_VARKEYWORDS:
        yield from local.get(next(others), {}).values()


def _is_held(value: Any) -> bool:
    """Whether an op can be given it."""
    if type(value) in (list, tuple):
        return all(map(_is_held, value))
    return isinstance(value, (Tensor, *SCALARS))
