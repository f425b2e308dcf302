"""torch.export of a module and its loss, on the meta device and without noise."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import linecache
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._export.utils import _compiling_state_context
from torch.fx.proxy import TracerBase

from planner.capture.checks.conversions import same_parts
from planner.capture.checks.draws.python_draws import draws_so_far
from planner.capture.checks.draws.seeds import Seeds
from planner.capture.checks.functions import FunctionCalls, is_seen_through
from planner.capture.checks.hooks import saved_tensors_untouched
from planner.capture.checks.on_meta.rehearsal import (
    Rehearsal,
    refuse_evolving,
    rehearse,
    release_in_order,
    state_of,
)
from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.diagnose import explain
from planner.capture.flex import flex_written_out
from planner.capture.modes.precision import mixed_dtypes
from planner.capture.opaque import OpaqueModules
from planner.capture.reading.read import Reader
from planner.capture.reading.record import Exported
from planner.capture.repeats.calls import (
    calls_noted,
    changes_nothing,
    keeps_tensors,
    no_functions,
)
from planner.capture.repeats.trace import Trace, layers_noted, noted_forward, trace_forward
from planner.collector import no_gc
from planner.errors import CaptureError, ModelError
from planner.language.graph.batch import Tree, call_with_batch, loss_of, unflatten_batch


def meta_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with every tensor on the meta device; ties kept, weights not copied."""
    return copy_with_tensors(module, lambda tensor: tensor.detach().to("meta"))


def copy_with_tensors(
    module: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """Copy a module, what `make` returns in the place of each of its tensors; ties are kept.

    What its cached properties hold, which an earlier forward may have asked for, is not copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        held = itertools.chain(
            part._parameters.values(),
            part._buffers.values(),
            (v for v in vars(part).values() if isinstance(v, torch.Tensor)),
        )
        for tensor in held:
            if tensor is None or id(tensor) in memo:
                continue
            local = make(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                local = torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = local
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name in list(vars(part)):
            if isinstance(getattr(type(part), name, None), functools.cached_property):
                delattr(part, name)
    return copied


class _LossModule(torch.nn.Module):
    """The user's module with its loss: tensors in, scalar out."""

    def __init__(
        self,
        user: torch.nn.Module,
        tree: Tree,
        paths: tuple[str, ...],
        loss: Any,
        opaque: OpaqueModules,
    ):
        super().__init__()
        self.user = user
        self._planner_tree, self._planner_paths, self._planner_loss = tree, paths, loss
        self._planner_precision, self._planner_branches = opaque.precision, opaque.branches
        self.made = OnMeta()
        self._planner_noting: AbstractContextManager[Any] = nullcontext()

    def noting(self, mode: AbstractContextManager[Any]) -> None:
        """Run the next forward in a mode inside of all others."""
        self._planner_noting = mode

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = dict(zip(self._planner_paths, tensors, strict=True))
        batch = unflatten_batch(self._planner_tree, leaves)
        with self.made:
            if self._planner_precision == "model":
                return self._planner_branches.run(self._loss, batch)
            with mixed_dtypes(self._planner_precision):
                return self._planner_branches.run(self._loss, batch).float()

    def _loss(self, batch: Any) -> torch.Tensor:
        with self._planner_noting:
            return loss_of(call_with_batch(self.user, batch), batch, self._planner_loss)


def rehearse_batch(
    fresh: Callable[[], torch.nn.Module],
    tensors: Mapping[str, Any],
    tree: Tree,
    loss: Any,
    paths: tuple[str, ...],
    opaque: OpaqueModules,
) -> tuple[Rehearsal, Trace | None]:
    """Run a module on meta tensors shaped like `tensors`, twice; see `rehearse`.

    `fresh` returns a copy of the module; calls of modules that are `opaque` are ops. Returns what
    the first forward does, too, unless it takes fake tensors alone; `paths` are the lists of layers
    that are told apart. Raises CaptureError in one line, or ModelError when batch and forward do
    not fit.
    """
    for faked in (False, True):
        module = fresh()
        wrapped = _LossModule(module, tree, tuple(tensors), loss, opaque)
        trace = Trace()
        noted = functools.partial(noted_forward, trace, module, wrapped.made, paths)
        try:
            with _as_captured(), saved_tensors_untouched(), opaque.as_ops():
                rehearsal = rehearse(
                    wrapped,
                    module,
                    _empty(tensors),
                    wrapped.made,
                    faked=faked,
                    noted=nullcontext if faked else noted,
                )
                return rehearsal, None if faked else trace
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            if faked:
                raise CaptureError(explain(error)) from error
            # Plain meta tensors are five times as fast as fake ones, and take fewer ops.
    raise AssertionError("a rehearsal returns or raises")


def trace_batch(
    module: torch.nn.Module,
    tensors: Mapping[str, Any],
    tree: Tree,
    loss: Any,
    paths: tuple[str, ...],
    opaque: OpaqueModules,
) -> Trace | None:
    """Return what one forward does on meta tensors shaped like `tensors`; None where it fails.

    `paths` are the lists of layers that are told apart. The module is spent afterwards.
    """
    wrapped = _LossModule(module, tree, tuple(tensors), loss, opaque)
    try:
        with _without_export(), opaque.as_ops():
            return trace_forward(module, wrapped, _empty(tensors), wrapped.made, paths)
    except Exception:  # of a module with layers left out, or that takes fake tensors alone
        return None


def trace_calls(
    module: torch.nn.Module,
    tensors: Mapping[str, Any],
    tree: Tree,
    loss: Any,
    paths: tuple[str, ...],
    opaque: OpaqueModules,
) -> Trace | None:
    """Return the functions that a module's second forward calls, with those of its first.

    None where calls do not show all that these do, or where the module changes from one to the
    other in a way that `rehearse_batch` may refuse. `paths` are the lists of layers that are told
    apart. The module is spent afterwards. Raises CaptureError where the second forward calls others
    than the first, and neither the module nor a tensor that it kept says why.
    """
    if opaque.keeps_any:
        return None
    wrapped = _LossModule(module, tree, tuple(tensors), loss, opaque)
    known: dict[Any, Any] = {}
    origin: dict[int, Any] = {}
    states, draws, seeds = [state_of(module)], draws_so_far(), Seeds()
    trace: Trace | None = None
    try:
        with _without_export(), no_functions(), seeds.noted():
            for _ in range(2):
                trace, inputs = Trace(earlier=trace), _empty(tensors)
                wrapped.noting(calls_noted(trace, module, inputs, wrapped.made, known, origin))
                with layers_noted(trace, module, paths):
                    if not wrapped(*inputs).requires_grad or not trace.is_whole:
                        return None
                states.append(state_of(module))
        refuse_evolving(states[0], states[1], states[2], is_same=True)
        if draws_so_far() != draws or seeds.set_by is not None:
            return None
    except Exception:  # told by what looks at ops
        return None
    finally:
        held = [tensor for tensor, _ in origin.values()]
        origin.clear()
        release_in_order(held)
    assert trace is not None, "a forward ran, or the reason was told"
    # What lies outside of the module is as these forwards left it: nobody can tell this later.
    is_same = changes_nothing(trace) or keeps_tensors(trace)
    if not is_same and states[0] == states[1] == states[2]:
        refuse_evolving(states[0], states[1], states[2], is_same=False)
    return trace


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Inside, a module whose tensors are on the meta device runs as it does while captured."""
    with _without_export(), OnMeta():
        yield


def run_on_meta(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    tree: Tree,
    loss: Any,
    opaque: OpaqueModules,
) -> None:
    """Run one forward of a module on meta tensors, as it is captured. The module is spent."""
    wrapped = _LossModule(module, tree, tuple(tensors), loss, opaque)
    with _without_export(), opaque.as_ops():
        wrapped(*tensors.values())


def _empty(tensors: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors.values())


def export_batch(
    module: torch.nn.Module,
    tensors: Mapping[str, Any],
    tree: Tree,
    loss: Any,
    rehearsal: Rehearsal,
    opaque: OpaqueModules,
    num_samples: int,
) -> Exported:
    """Export a module on meta tensors shaped like `tensors` and read the result.

    These hold so many samples. `rehearsal` is what its forward showed. The module's parameters are
    in the dtype of the precision already. Calls of modules that are `opaque` become ops. Raises
    CaptureError in one line, or ModelError when batch and forward do not fit.
    """
    args = _empty(tensors)
    wrapped = _LossModule(module, tree, tuple(tensors), loss, opaque)
    functions = FunctionCalls()
    try:
        with (
            _as_captured(),
            functions.recorded(),
            _whole_stack_traces(),
            opaque.as_ops(num_samples),
        ):
            program = torch.export.export(wrapped, args, strict=False)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise CaptureError(explain(error)) from error
    called = {call.function for call in functions.calls}
    for function in rehearsal.functions - called:
        if not is_seen_through(function):
            raise CaptureError(
                f"the backward of the autograd function {function.__qualname__} would be lost; "
                "call it by the apply() that torch.autograd.Function has"
            )
    reader = Reader(
        program,
        module,
        tuple(tensors),
        made=wrapped.made,
        calls=functions.calls,
        modules=opaque,
        reached=rehearsal.reached,
    )
    return reader.read()


@contextlib.contextmanager
def _as_captured() -> Iterator[None]:
    """Let a forward run as it is captured, rehearsed and traced alike."""
    with (
        _quiet(),
        no_gc(),
        torch.enable_grad(),
        _buffers_assigned_in_place(),
        same_parts(),
        flex_written_out(),
    ):
        yield


@contextlib.contextmanager
def _without_export() -> Iterator[None]:
    """Let a forward run as it is captured where nothing exports it: as a module that is compiled
    does.
    """
    with _as_captured(), saved_tensors_untouched(), _compiling_state_context():
        yield


@contextlib.contextmanager
def _whole_stack_traces() -> Iterator[None]:
    """Let ops remember the helper that made them, not just the `forward` that called it."""
    given = TracerBase._filter_traceback_frames
    linecache.checkcache()  # a file may have been edited since it was shown last

    def from_first_forward(
        self: TracerBase, user_stack_summary: traceback.StackSummary
    ) -> traceback.StackSummary:
        names = [frame.name for frame in user_stack_summary]
        first = names.index("forward") if "forward" in names else len(names)
        return traceback.StackSummary.from_list(list(user_stack_summary)[first:])

    TracerBase._filter_traceback_frames = from_first_forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = given  # type: ignore[method-assign]


@contextlib.contextmanager
def _buffers_assigned_in_place() -> Iterator[None]:
    """Let a forward's ``self.mean = new`` write into the buffer `mean`, as it means to.

    torch.export puts the old buffer back instead, and the assignment would be lost.
    """
    assign = torch.nn.Module.__setattr__

    def assign_or_write(self: torch.nn.Module, name: str, value: Any) -> None:
        held = self.__dict__.get("_buffers", {}).get(name)
        if (
            isinstance(held, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and value is not held
            and (value.shape, value.dtype) == (held.shape, held.dtype)
        ):
            held.copy_(value)
        else:
            assign(self, name, value)

    torch.nn.Module.__setattr__ = assign_or_write  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__setattr__ = assign  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings, logs and the graph dumps that a failing export prints to stderr.

    What went wrong reaches the user as one line instead (`_explain`).
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
