"""Ops in the place of calls of modules that no graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from planner.capture.align import BATCH_SIZES
from planner.capture.branches import Branches
from planner.capture.diagnose import calling_line, causes, depends_on_values, user_line
from planner.capture.opaque.trial import SCALARS, ModuleCall, NotHeld, Place, Trial
from planner.graph.module_keys import module_key
from planner.plan import Precision
from planner.runtime.stage.calls.opaque_modules import SEEDS, tensors_of

torch.library.define("planner::opaque_module", "(Tensor[] tensors, int call) -> Tensor[]")


@dataclass(kw_only=True)
class OpaqueModules:
    """The classes that a capture keeps as ops, and their calls. Mutable: both grow.

    Attributes:
        precision: that the model is captured in.
        branches: that its forward takes where it tests whether a compiler runs.
        calls: each once, however often it is made; ops name them by their number.
    """

    precision: Precision = "model"
    branches: Branches = field(default_factory=Branches)
    calls: list[ModuleCall] = field(default_factory=list)
    _forwards: dict[type[nn.Module], Callable[..., Any]] = field(default_factory=dict)
    _because: dict[type[nn.Module], str] = field(default_factory=dict)
    """Where the forward of each depends on values."""
    _known: dict[Any, int] = field(default_factory=dict)
    _in_order: list[int] = field(default_factory=list)
    """Numbers of the calls of the last forward of the smaller batch."""
    _position: int = 0
    _num_samples: int = BATCH_SIZES[0]

    def add_from(self, error: BaseException, model: nn.Module) -> bool:
        """Add the class of the innermost module in whose forward an error was raised that values,
        or what a smaller module gives, brought about. False where there is none below the model
        itself that is not added already.
        """
        if not depends_on_values(error) and not any(isinstance(e, NotHeld) for e in causes(error)):
            return False
        kinds = {type(part) for part in model.modules()} - {type(model)}
        for module in reversed(_modules_in(error)):
            kind = type(module)
            if kind in kinds and kind not in self._forwards:
                self._forwards[kind] = kind.forward
                inner = next(reversed(self._because.values()), "")  # else: that can't be an op
                self._because[kind] = user_line(error) if depends_on_values(error) else inner
                return True
        return False

    @contextmanager
    def as_ops(self, num_samples: int = BATCH_SIZES[0]) -> Iterator[None]:
        """Turn calls of these modules inside, in the forward of a batch, into ops."""
        _active.append(self)
        self._num_samples, self._position = num_samples, 0
        if num_samples == BATCH_SIZES[0]:
            self._in_order.clear()
        try:
            for kind, forward in self._forwards.items():
                kind.forward = self._replaced(forward)
            yield
        finally:
            self._put_back()
            _active.pop()

    def _replaced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, args, kwargs)

        run.__wrapped__ = forward  # type: ignore[attr-defined] # whose source is read
        return run

    def _put_back(self) -> None:
        for kind, forward in self._forwards.items():
            kind.forward = forward

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        because = next(
            (self._because[each] for each in type(module).__mro__ if each in self._because), ""
        )
        who = (
            f"{type(module).__qualname__}{calling_line()}, whose forward depends on values{because}"
        )
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
        replaced = {kind: kind.forward for kind in self._forwards}
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
                    first = self.calls[self._in_order[self._position]]
                trial = Trial(
                    module=module,
                    precision=self.precision,
                    who=who,
                    key=key,
                    places=places,
                    given=given,
                    num_samples=self._num_samples,
                    first=first,
                )
                self.calls.append(trial.run())
                self._known[known] = len(self.calls) - 1
            number = self._known[known]
        finally:
            for kind, forward in replaced.items():
                kind.forward = forward
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


def _modules_in(error: BaseException) -> list[nn.Module]:
    """Return the modules in whose forward an error was first raised, the outermost first."""
    for cause in reversed([*causes(error)]):
        found = _modules_on(cause.__traceback__)
        if found:  # else it was being handled already when the capture began
            return found
    return []


def _modules_on(trace: TracebackType | None) -> list[nn.Module]:
    found: list[nn.Module] = []
    while trace is not None:
        code, local = trace.tb_frame.f_code, trace.tb_frame.f_locals
        module = local.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and code.co_name == "forward":
            found.append(module)
        trace = trace.tb_next
    return found
