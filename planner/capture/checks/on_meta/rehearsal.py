"""Two forwards run as they stand, on tensors without values, before a model is captured.

A capture sees one forward. What a model does beside computing, it can't see: a counter that
grows, a tensor kept for the next forward, a parameter frozen on the way, a choice drawn by
Python. So the module runs twice, and each run's loss is followed back by value numbering: a
tensor's number is a digest of the op that made it and of the numbers of what the op read
(Cocke and Schwartz, "Programming Languages and Their Compilers", 1970). A model that computes
the same in each forward gives both losses one number, however much it caches on the way; what
is left changed in the module must be the same after both. What autograd would reach from the
loss is read off, too: a parameter that no gradient reaches has none in training.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.capture.checks.backward import refuse_failing_backward
from planner.capture.checks.draws.python_draws import decide_nothing, draws_so_far
from planner.capture.checks.draws.seeds import Seeds
from planner.capture.checks.functions import AutogradFunction, checkpoints_inside
from planner.capture.checks.kernels import Kernels
from planner.capture.checks.on_meta.meta_results import MetaResults
from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.diagnose import calling_line
from planner.errors import CaptureError

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_DEPTH, _LENGTH = 6, 10_000
"""So far into nested objects, and into containers of so many items, state is compared."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What two forwards showed.

    `reached` names the parameters that a gradient reaches; `functions` are the autograd
    functions of Python on the way, whose backward is not that of the ops in their forward;
    `visited` are the numbers of the nodes that a backward goes through, in order.
    """

    reached: frozenset[str]
    functions: frozenset[AutogradFunction]
    visited: tuple[int, ...] = ()


def rehearse(
    run: nn.Module,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    made: OnMeta,
    *,
    faked: bool = False,
    noted: Callable[[tuple[Tensor, ...]], AbstractContextManager[Any]] = nullcontext,
) -> Rehearsal:
    """Run `run(*inputs)`, which is `module` with its loss, twice, and compare.

    Tensors are on the meta device, `faked` as torch.export fakes them or plain; `made` is the mode
    that `run` enters, `noted(inputs)` what the first forward runs in. The module is spent
    afterwards: it keeps what its forward leaves. Raises CaptureError where the second forward
    computes something else than the first, or would in time; whatever the forward itself raises
    passes through.
    """
    numbers = _Numbers(module, made)
    before, draws, seeds = state_of(module), draws_so_far(), Seeds()
    kernels = FakeTensorMode(allow_non_fake_inputs=True) if faked else MetaResults()
    try:
        with _compiling_state_context(), kernels, checkpoints_inside(), seeds.noted():
            first_inputs = _like(inputs)
            with noted(first_inputs):
                loss, first = numbers.of_loss(run, first_inputs)
            after_first = state_of(module)
            found = _walk_back(loss, module)
            trains = loss.requires_grad
            writes = numbers.writes
            numbers.forget_batch()
            loss, second = numbers.of_loss(run, _like(inputs))
            after_second = state_of(module)

            def number_again() -> int:
                return numbers.of_loss(run, _like(inputs))[1].number

            is_drawn = draws_so_far() != draws and not decide_nothing(number_again, first.number)
            if writes or found.functions:
                refuse_failing_backward(
                    loss, module.parameters(), lambda: numbers.of_loss(run, _like(inputs))[0]
                )
    finally:
        loss = None  # type: ignore[assignment]
        numbers.release()
    if is_drawn:
        raise CaptureError(
            "forward draws random numbers from Python or NumPy, and a captured model would repeat "
            "one draw in every step; draw with torch (torch.rand, torch.where)"
        )
    if seeds.set_by is not None:
        raise CaptureError(
            f"forward sets the random state ({seeds.set_by}), and a plan draws from a stream of "
            "its own, new numbers in each step; for the same ones draw them in __init__ into a "
            "buffer, or pass them with the batch"
        )
    # Equal numbers are not enough: a loss may read what an earlier forward kept of its batch.
    is_same = first.number == second.number and not second.reads_old_batch
    refuse_evolving(before, after_first, after_second, is_same=is_same)
    if not trains:
        raise CaptureError(
            "no gradient reaches a parameter from the loss, so backward() fails; let a parameter "
            "train, and make the loss without detach() and torch.no_grad()"
        )
    return found


def _like(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in inputs)


def refuse_evolving(
    before: _State, after_first: _State, after_second: _State, *, is_same: bool
) -> None:
    """Refuse a module that is not the same in each step: its state before, after a forward and
    after two; `is_same` says whether both computed the same.
    """
    changed = [name for name, value in after_first.items() if value != before.get(name)]
    # Those of a module that the forward puts in another's place are no changes.
    flags = [
        name
        for name in changed
        if name in before and name.endswith((".requires_grad", ".training"))
    ]
    if flags:
        owner, _, flag = flags[0].rpartition(".")
        raise CaptureError(
            f"forward sets {flag} of {owner} to {after_first[flags[0]]}, so the second step "
            "computes something else than the first; set it before training begins"
        )
    moved = [name for name, value in after_second.items() if value != after_first.get(name)]
    counted = [name for name in moved if not isinstance(after_second[name], _Same)]
    if is_same and not counted:
        return
    blamed = counted or moved or changed
    if not blamed:
        raise CaptureError(
            "the second forward computes something else than the first, and nothing in the module "
            "says why (a global, a closure, the time?); a captured model repeats one forward in "
            "every step; pass what changes with the batch"
        )
    values = f" ({after_first.get(counted[0])}, then {after_second[counted[0]]})" if counted else ""
    more = f" and {len(blamed) - 1} more" if len(blamed) > 1 else ""
    raise CaptureError(
        f"forward changes {blamed[0]}{values}{more} and a captured model repeats one forward in "
        "every step; keep it in a buffer that is updated in place, or pass it with the batch"
    )


# -- the state of a module ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Same:
    """Something that is compared by identity; held, so that its id stays its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


_State = Mapping[str, Any]
"""What a module holds beside weights, by path: numbers and text as they are, the rest `_Same`."""


def state_of(module: nn.Module) -> _State:
    """Return what two forwards of a module are compared by."""
    state: dict[str, Any] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        state[f"{name or 'the model'}.training"] = part.training
        inner = f"{name}." if name else ""
        for key, value in vars(part).items():
            if key not in _STANDARD:
                _note(f"{inner}{key}", value, state, seen, _DEPTH)
        for key, buffer in part._buffers.items():
            state[f"{inner}{key}"] = _Same(buffer)
    for name, param in module.named_parameters():
        state[f"{name}.requires_grad"] = param.requires_grad
    return state


def _note(path: str, value: Any, state: dict[str, Any], seen: set[int], depth: int) -> None:
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        state[path] = repr(value)
        return
    if isinstance(value, np.ndarray):
        state[path] = (value.shape, value.tobytes())
        return
    state[path] = _Same(value)
    opaque = Tensor | nn.Module | type | ModuleType | FunctionType | MethodType | torch.dtype
    if isinstance(value, opaque) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        # Containers of one type that hold the same are the same, made anew or not.
        items = enumerate(value)
        state[path] = type(value).__name__
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    else:  # an iterator prints where it is
        state[path] = repr(value)
        return
    if not hasattr(value, "__len__") or len(value) <= _LENGTH:
        for key, item in list(items):
            _note(f"{path}.{key}", item, state, seen, depth - 1)


# -- what autograd reaches ----------------------------------------------------------------


def _walk_back(loss: Tensor, module: nn.Module) -> Rehearsal:
    names = {id(param): name for name, param in module.named_parameters()}
    reached: set[str] = set()
    functions: set[AutogradFunction] = set()
    seen: set[Any] = set()
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in names:
            reached.add(names[id(leaf)])
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            functions.add(type(node)._forward_cls)
        queue.extend(following for following, _ in node.next_functions)
    return Rehearsal(
        reached=frozenset(reached),
        functions=frozenset(functions),
        visited=tuple(sorted(node._sequence_nr() for node in seen)),
    )


def release_in_order(tensors: list[Tensor]) -> None:
    """Let go of tensors, and of their autograd graph from its end to its beginning.

    Autograd frees a node and, inside of that, the saved tensors whose nodes nothing else
    holds: a chain of 10,000 ops, freed by its end alone, overflows the stack. Here each
    node is still held when those that saved its output are freed. The list is empty afterwards.
    """
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    in_order = sorted(nodes, key=lambda node: node._sequence_nr())
    nodes.clear()
    tensors.clear()
    while in_order:
        in_order.pop()


# -- value numbering ----------------------------------------------------------------------


def flattened(value: Any, leaves: list[Any]) -> Hashable:
    """Append the leaves of an op's arguments, and return what holds them; as `tree_flatten`, but
    faster for the plain containers that ops take.
    """
    if isinstance(value, list | tuple):
        return type(value), *(flattened(item, leaves) for item in value)
    if isinstance(value, dict):
        return dict, *((key, flattened(item, leaves)) for key, item in value.items())
    leaves.append(value)
    return None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The number of a forward's loss, and whether an earlier forward's batch went into it."""

    number: int
    reads_old_batch: bool


@dataclass(frozen=True, slots=True)
class _Value:
    """What a tensor is worth: a number equal for equal computations, and what it comes from."""

    number: int
    from_batch: bool = False
    from_old_batch: bool = False

    def aged(self) -> _Value:
        """Return the value for a forward that has another batch."""
        old = self.from_batch or self.from_old_batch
        return _Value(self.number, from_old_batch=old)


@functools.cache
def _aliased(func: Any) -> tuple[Any, ...]:
    """The arguments of an op that it writes to, or returns views of."""
    return tuple(each for each in func._schema.arguments if each.alias_info is not None)


class _Numbers(TorchDispatchMode):
    """Numbers tensors as ops make them. Mutable: it grows with each op.

    Tensors are known by identity, and held so that an id stays their own. A write in place
    changes what its storage, and so each view of it, is worth.
    """

    def __init__(self, module: nn.Module, made: OnMeta) -> None:
        super().__init__()
        self._module, self._made = module, made
        self._own = {id(t): t for t in chain(module.parameters(), module.buffers())}
        self._params = {id(param): name for name, param in module.named_parameters()}
        self._tensors: dict[int, tuple[Tensor, _Value]] = {}
        self._storages: dict[int, _Value] = {}
        self._kernels = Kernels(made)
        self.writes = 0
        """Ops so far that wrote in place."""

    def of_loss(self, run: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, _Run]:
        """Run a forward and return its loss, and the loss's number."""
        for name, tensor in chain(self._module.named_parameters(), self._module.named_buffers()):
            if id(tensor) not in self._own:
                continue  # a buffer that a forward put in the place of another
            # What a forward writes into a buffer, a graph keeps: it starts as itself again.
            self._set(tensor, _Value(hash(name)))
            # (A write of the forward before counts for the storage until it is forgotten here.)
            self._storages.pop(tensor.untyped_storage()._cdata, None)
        for index, tensor in enumerate(inputs):
            self._set(tensor, _Value(hash(index), from_batch=True))
        with self:
            loss = run(*inputs)
        value = self._value(loss)
        return loss, _Run(number=value.number, reads_old_batch=value.from_old_batch)

    def release(self) -> None:
        """Let go of all tensors."""
        tensors = [tensor for tensor, _ in self._tensors.values()]
        self._tensors.clear()
        release_in_order(tensors)

    def forget_batch(self) -> None:
        """From now on, what came from a batch comes from an old one."""
        self._tensors = {
            key: (tensor, value.aged()) for key, (tensor, value) in self._tensors.items()
        }
        self._storages = {key: value.aged() for key, value in self._storages.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves: list[Any] = []
        flattened((args, kwargs or {}), leaves)
        self._kernels.refuse_failing(func, args, kwargs or {}, leaves)
        made = func(*args, **(kwargs or {}))
        parts: list[Any] = [func]
        # What is drawn is this forward's, like its batch.
        from_batch, from_old = torch.Tag.nondeterministic_seeded in func.tags, False
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                # Equal ops on equal numbers have equal results.
                value = self._value(leaf)
                parts.append(value.number)
                from_batch |= value.from_batch
                from_old |= value.from_old_batch
            else:
                parts.append(repr(leaf))
        for index, leaf in enumerate(tree_leaves(made)):
            if isinstance(leaf, Tensor):
                self._set(leaf, _Value(hash((*parts, index)), from_batch, from_old))
        aliased = _aliased(func)
        if not aliased:
            return made
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        named |= kwargs or {}
        for argument in aliased:
            for leaf in tree_leaves(named.get(argument.name)):
                param = self._params.get(id(leaf))
                if argument.alias_info.is_write:
                    self.writes += 1
                    # The op read the old value, whose number is among `parts`: writes follow each
                    # other in this number.
                    written = _Value(hash(tuple(parts)), from_batch, from_old)
                    self._storages[leaf.untyped_storage()._cdata] = written
                    if param is not None:
                        raise CaptureError(
                            f"forward writes in place into parameter {param}{calling_line()}; "
                            "parameters of a plan change by the optimizer alone: compute with a "
                            "changed copy (weight.clamp(...)), or change it between steps"
                        )
                elif param is not None:  # a view of a parameter is that parameter
                    self._params |= {id(t): param for t in tree_leaves(made)}
        return made

    def _set(self, tensor: Tensor, value: _Value) -> None:
        self._tensors[id(tensor)] = (tensor, value)

    def _value(self, tensor: Tensor) -> _Value:
        known = self._tensors.get(id(tensor))
        if known is None:
            known = tensor, _Value(hash(self._made.told(tensor)))
            self._tensors[id(tensor)] = known
        # A write through any view changes what all tensors of the storage are worth.
        written = self._storages.get(tensor.untyped_storage()._cdata)
        if written is None:
            return known[1]
        return _Value(
            hash((known[1].number, written.number)),
            known[1].from_batch or written.from_batch,
            known[1].from_old_batch or written.from_old_batch,
        )
