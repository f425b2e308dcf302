"""Branches that a forward takes where it tests ``torch.compiler.is_compiling()``.

Training takes those for no compiler, and so does a capture: what the other branch computes may be
something else. But libraries look into a mask only where no compiler is (``if not is_tracing(mask)
and mask.all(): mask = None``), which no capture can follow. Where it fails there, that test alone
is answered as for a compiler, and the rest as in training:

    failed:   Model.forward:80 > make_mask:12 > skips:31 > Tensor.all
    tests:    Model.forward:75 > is_tracing:3                             a branch that has ended
              Model.forward:80 > make_mask:12 > skips:30 > is_tracing:3   the nearest: answered True
              Model.forward:90 > Layer.forward:7 > ...                    in another module

The nearest has the most functions in common with the failure, and of those in the module in whose
forward the capture failed: a branch that a module takes may choose what another is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.capture.diagnose import causes

Call = tuple[CodeType, int]
"""A function, and the line of it that runs."""


_TORCH = str(Path(torch.__file__).parent)
_TORCHS_LAYERS = str(Path(_TORCH, "nn"))


class TracersTensor:
    """Stands for the class of a tracer's tensors: in training no tensor is of it.

    Libraries take ``isinstance(x, torch._subclasses.FakeTensor)`` for another way to test whether
    a compiler runs. PyTorch itself is given the truth.
    """

    def __init__(self, answer: Callable[[], bool]) -> None:
        self._answer = answer

    def __instancecheck__(self, value: object) -> bool:
        if not isinstance(value, FakeTensor):
            return False
        return sys._getframe(1).f_code.co_filename.startswith(_TORCH) or self._answer()

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, FakeTensor)

    def __eq__(self, other: object) -> bool:
        return other is FakeTensor

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make what the class makes."""
        return FakeTensor(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(FakeTensor, name)


class Branches:
    """The tests of a forward that are answered as for a compiler. Mutable: a failure adds one."""

    def __init__(self) -> None:
        self._as_compiled: set[Call] = set()
        self._tests: list[list[Call]] = []  # of the last forward: the calls that lead to each
        self._tried: set[Call] = set()
        self._truth = False  # whether a compiler runs around the forward
        self._last: tuple[Call, list[Call]] | None = None  # the last that was added, and for what

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, its tests of whether a compiler runs answered as these branches say."""
        answers: list[tuple[Any, str, Any]] = [
            (torch.compiler, "is_compiling", self._answer),
            (torch.compiler, "is_exporting", self._answer),
            (torch.compiler, "_is_compiling_flag", False),  # for those that keep the functions
            (torch.compiler, "_is_exporting_flag", False),
            (torch._subclasses, "FakeTensor", TracersTensor(self._answer)),
        ]
        given = [getattr(where, name) for where, name, _ in answers]
        self._truth = torch.compiler.is_compiling()
        self._tests.clear()
        try:
            for where, name, answer in answers:
                setattr(where, name, answer)
            return function(*args)
        finally:
            for (where, name, _), before in zip(answers, given, strict=True):
                setattr(where, name, before)

    def _answer(self) -> bool:
        asking = sys._getframe(1)
        file = asking.f_code.co_filename
        if file.startswith(_TORCH) and not file.startswith(_TORCHS_LAYERS):
            return self._truth  # it wraps calls and dispatches ops, and branches for no model
        calls = [(frame.f_code, frame.f_lineno) for frame in _up_to_run(asking)]
        if not self._as_compiled.isdisjoint(calls):
            return True
        self._tests.append(calls[::-1])
        return False

    def turn(self, error: BaseException) -> bool:
        """Answer the test nearest to where a capture failed as for a compiler.

        Of tests as near, it is the last. A test whose other branch fails at the same place is
        answered as before. False where no test is left.
        """
        failed, module_at = _calls_to(error)
        if self._last is not None and self._last[1] == failed:
            self._as_compiled.discard(self._last[0])
        for place in self._nearest(failed, module_at):
            if place not in self._tried:
                self._tried.add(place)
                self._as_compiled.add(place)
                self._last = place, failed
                return True
        self._last = None
        return False

    def _nearest(self, failed: list[Call], module_at: int) -> list[Call]:
        """Return the places of the tests in the module that failed, the nearest first."""
        found = []
        for order, calls in enumerate(self._tests):
            same = len(
                list(takewhile(lambda pair: pair[0] == pair[1], zip(calls, failed, strict=False)))
            )
            if same < min(len(calls), len(failed)) and calls[same][0] is failed[same][0]:
                same += 1  # two lines of a function
            if same > module_at:
                found.append((same, order, calls[same - 1]))
        return [place for *_, place in sorted(found, key=lambda each: each[:2], reverse=True)]


def _up_to_run(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not Branches.run.__code__:
        yield frame
        frame = frame.f_back


def _calls_to(error: BaseException) -> tuple[list[Call], int]:
    """Return the calls that led to where a forward failed, and which is of the innermost module."""
    for cause in reversed([*causes(error)]):
        calls: list[Call] = []
        module_at, runs = 0, False
        for trace in _following(cause.__traceback__):
            code = trace.tb_frame.f_code
            if runs:
                first = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else 0
                if code.co_name == "forward" and isinstance(first, nn.Module):
                    module_at = len(calls)
                calls.append((code, trace.tb_lineno))
            runs = runs or code is Branches.run.__code__
        if calls:
            return calls, module_at
    return [], 0


def _following(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
