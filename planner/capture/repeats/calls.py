"""What a forward calls, function by function, at a tenth of what its ops take.

Running a forward of many equal layers under modes that look at each op takes nearly all of a
capture, and shows the same thing for each layer. Here the functions of torch that it calls are
noted instead (a product, a norm), and a call equal to an earlier one is not run: tensors of the
layouts that the earlier one returned stand for its results. The forward's own Python runs, layer by
layer, so that what a layer does by its number, by an attribute or by what it is given is seen.

Two calls are equal if they are of one function, under equal settings of torch, on tensors of equal
layouts (with or without gradient, of known values or not) and equal numbers. A function is run each
time where it may do more than return new tensors: it writes into what it is given, returns a part
of it, or what it returns has values that are known. A forward that asks for what a standing tensor
has not (its place in autograd's graph) is not followed: `Unseen` is raised, and ops are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from planner.capture.checks.on_meta.rehearsal import flattened
from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.repeats.trace import Earlier, Held, Made, Trace


class Unseen(Exception):
    """A forward does what its calls of functions do not show."""


_OF_LAYOUT = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "names"),
    *("is_meta", "is_cpu", "is_cuda", "is_nested", "is_quantized", "is_sparse", "is_xpu", "is_mps"),
}
"""Attributes that follow from what makes two tensors equal here."""

_OF_AUTOGRAD = {
    *("is_leaf", "grad_fn", "grad", "output_nr", "retains_grad", "_version", "_base", "_is_view"),
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "backward", "retain_grad"),
    *("grad_dtype", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook"),
}
"""Attributes and methods that tell a tensor which stands for a result from the result."""

_PLAIN = {
    *(type(None), bool, int, float, str, slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Types of arguments that are the same wherever they are spelled the same."""

_DEVICES = ("cpu", "cuda")
"""Devices that autocast may be on for: what a function returns depends on it."""

_OWN_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor", "torch._C")
"""Modules of functions whose results follow from their arguments and `settings`."""


@functools.cache
def _calls_others(func: Any) -> bool:
    """Whether a function is Python that may call what it likes, by what nobody sees here."""
    return hasattr(func, "__code__") and not str(func.__module__).startswith(_OWN_PYTHON)


@functools.cache
def _returns_alike(func: Any) -> bool:
    """Whether a function returns the same layouts for equal arguments, if it returns new tensors:
    torch's own, compiled or of `torch.nn.functional`.
    """
    if str(getattr(func, "__qualname__", "")).startswith(_FUNCTIONS):
        return True
    module = str(getattr(func, "__module__", None) or "")
    if not module:  # methods of tensors, and functions, that are compiled
        owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
        module = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", ""))
    return module.startswith(_OWN_PYTHON)


_FUNCTIONS = torch.cat.__qualname__.removesuffix("cat")
"""The class that has the functions of `torch` itself, which name `torch` for their module."""

_VIEWS = {
    *("view", "reshape", "transpose", "unsqueeze", "squeeze", "expand", "permute", "flatten"),
    *("contiguous", "select", "narrow", "t", "unflatten", "movedim", "swapaxes", "view_as"),
    "__getitem__",
}
"""Functions that the modes around call as they are, given numbers, slices and no known values."""


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Size, stride and dtype of a tensor, and whether autograd records what is done with it."""


@dataclass(frozen=True, slots=True)
class _Returned:
    """What a call returned: new tensors of these layouts."""

    layouts: tuple[Layout, ...]
    container: type | None
    """Of several: tuple or list."""


_PART = object()
"""What a call returned: a part of what it was given."""


class _Calls(TorchFunctionMode):
    """Notes each call of a function; entered inside of all other modes.

    Tensors are known by identity, and held so that an id stays their own.
    """

    def __init__(
        self,
        trace: Trace,
        origin: dict[int, tuple[Tensor, Hashable]],
        known: dict[Hashable, _Returned | object | None],
        made: OnMeta,
    ) -> None:
        super().__init__()
        self._trace, self._events, self._origin = trace, trace.events, origin
        self._known, self._made = known, made

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a call; run it, or return what stands for its results."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name in _OF_LAYOUT:
                with torch._C.DisableTorchFunction():
                    return func(*args)
        if name in _OF_AUTOGRAD or _calls_others(func):
            raise self._unseen(name)
        kwargs = kwargs or {}
        leaves: list[Any] = []
        structure = flattened((args, kwargs), leaves)
        settings = (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            *map(torch.is_autocast_enabled, _DEVICES),
        )
        with torch._C.DisableTorchFunction():
            read, key, tensors = self._told(leaves)
            event = ((func, settings), structure, read)
            whole = None if key is None else (func, settings, structure, key)
            before = None if whole is None else self._known.get(whole)
            if type(before) is _Returned:
                return self._standing(event, before)
            if before is _PART:
                made = func(*args, **kwargs)
                self._note(event, made)
                return made
            versions = [tensor._version for tensor in tensors]
        made = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._note(event, made)
            if whole is not None and whole not in self._known:
                is_written = versions != [tensor._version for tensor in tensors]
                # (None: it is to be run each time.)
                found: _Returned | object | None = None
                if not is_written and _returns_alike(func):
                    found = self._new(made, tensors)
                    if found is None and name in _VIEWS and self._is_part(leaves, args, made):
                        found = _PART
                self._known[whole] = found
        return made

    def _is_part(self, leaves: list[Any], args: tuple[Any, ...], made: Any) -> bool:
        """Whether a call returns a part of its first tensor, whatever modes are around."""
        whole, numbers = leaves[0], leaves[1:]
        return (
            all(type(each) in (int, slice, type(None), type(...)) for each in numbers)
            and not any(type(each) is list for each in args)
            and not self._made.has_values(whole)
            and type(made) is Tensor
            and made.untyped_storage()._cdata == whole.untyped_storage()._cdata
        )

    def _unseen(self, what: str) -> Unseen:
        # (Told beside, as a forward may go on after an error.)
        self._trace.is_whole = False
        return Unseen(what)

    def _told(
        self, leaves: Iterable[Any]
    ) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...] | None, list[Tensor]]:
        """Return what a call reads, what results follow from (None: it must be run) and tensors."""
        read: list[Hashable] = []
        key: list[Hashable] = []
        tensors: list[Tensor] = []
        is_run = False
        for leaf in leaves:
            kind = type(leaf)
            if kind is Tensor or kind is nn.Parameter or isinstance(leaf, Tensor):
                tensors.append(leaf)
                origin = self._origin.get(id(leaf))
                read.append(("constant", *self._made.told(leaf)) if origin is None else origin[1])
                layout = _layout_of(leaf)
                is_run = is_run or layout is None
                key += (layout, self._made.has_values(leaf))
            elif kind in _PLAIN:
                told = repr(leaf)
                read.append(told)
                key.append(told)
            else:
                # What else a function is given may be called by it, out of sight.
                raise self._unseen(kind.__name__)
        return tuple(read), None if is_run else tuple(key), tensors

    def _standing(self, event: tuple[Any, ...], before: _Returned) -> Any:
        made = []
        for size, stride, dtype, has_gradient in before.layouts:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if has_gradient:
                # Of a leaf that has a gradient no write in place is taken.
                tensor = _NOT_A_LEAF(tensor.requires_grad_())
            made.append(tensor)
        number = len(self._events)
        for position, tensor in enumerate(made):
            self._origin[id(tensor)] = (tensor, Made(number, position))
        self._events.append((*event, before.layouts))
        return made[0] if before.container is None else before.container(made)

    def _note(self, event: tuple[Any, ...], made: Any) -> None:
        number = len(self._events)
        shapes: list[Hashable] = []
        for position, leaf in enumerate(tree_leaves(made)):
            if isinstance(leaf, Tensor):
                shapes.append(_layout_of(leaf) or (tuple(leaf.shape), str(leaf.dtype)))
                self._origin[id(leaf)] = (leaf, Made(number, position))
            else:
                shapes.append(repr(leaf))
        self._events.append((*event, tuple(shapes)))

    def _new(self, made: Any, tensors: Iterable[Tensor]) -> _Returned | None:
        """Return what results are if they are new tensors in memory of their own, else None."""
        container = type(made) if type(made) in (tuple, list) else None
        results = made if container is not None else (made,)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        layouts: list[Layout] = []
        for result in results:
            layout = _layout_of(result) if type(result) is Tensor else None
            if layout is None or result.storage_offset() or self._made.has_values(result):
                return None
            storage = result.untyped_storage()._cdata
            if storage in storages:
                return None
            storages.add(storage)
            layouts.append(layout)
        return _Returned(tuple(layouts), container)


_NOT_A_LEAF = torch._C._functions.DelayedError("a capture runs no backward", 1)


def _layout_of(tensor: Any) -> Layout | None:
    """Return the layout of an ordinary tensor on meta; None of another."""
    kind = type(tensor)
    if (kind is not Tensor and kind is not nn.Parameter) or not tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_neg():
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def calls_noted(
    trace: Trace,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    made: OnMeta,
    known: dict[Hashable, _Returned | object | None],
    origin: dict[int, tuple[Tensor, Hashable]],
) -> TorchFunctionMode:
    """Return the mode in which the calls of a forward on `inputs` are noted in `trace`.

    `known` are the calls so far, which grow. `origin` tells of tensors, by their ids, where they
    are from; it holds those of the forward before, and is turned to those of this one.
    """
    for key, (tensor, what) in origin.items():
        if not isinstance(what, Held | Earlier):
            origin[key] = tensor, Earlier(what)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        origin.setdefault(id(tensor), (tensor, Held(name)))
    for index, tensor in enumerate(inputs):
        origin[id(tensor)] = (tensor, ("input", index))
    return _Calls(trace, origin, known, made)


def changes_nothing(trace: Trace) -> bool:
    """Whether a forward calls the functions that the one before called."""
    assert trace.earlier is not None, "it is the second"
    first, second = ([event[0] for event in each.events] for each in (trace.earlier, trace))
    return first == second


def keeps_tensors(trace: Trace) -> bool:
    """Whether a forward reads what the one before made."""
    return any(
        isinstance(read, Earlier)
        for _, _, reads, _ in trace.events
        if isinstance(reads, tuple)
        for read in reads
    )


@contextmanager
def no_functions() -> Iterator[None]:
    """Raise `Unseen` where an autograd function of Python is called inside: its backward is its
    own, and no call of a function of torch shows that.
    """
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise Unseen(cls.__qualname__)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
