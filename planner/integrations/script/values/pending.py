"""Tensors that a call of the model returns before their values are there.

A loop calls the model, computes with what that returns, and calls `backward` on a loss; the engine
does all of this in one step, for which it needs the loss. So a call in training returns tensors
that have shapes, and note what is computed with them. `backward` gives the engine the batch, and
what was noted is then computed from real values, with autograd: the factor that reaches the loss
is that of its gradient in the update. Whoever reads a value earlier lets the step run earlier.

A write into a pending tensor is a note of its own. Other pending tensors in the same memory, whose
values it changes, may not be used any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from planner.capture.checks.stays_on_meta import StaysOnMeta
from planner.errors import PlanError
from planner.integrations.script.values.left import Left, refuse_left
from planner.integrations.script.values.notes import (
    Applied,
    AsGiven,
    Call,
    Node,
    Output,
    calls_of,
    outputs_of,
    value_of,
)

_READS = frozenset(
    {Tensor.__repr__, Tensor.__format__, Tensor.tolist, Tensor.numpy, Tensor.item,
     Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__array__,
     Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.untyped_storage, Tensor.storage}
)  # fmt: skip
"""Functions that read values though a tensor on the meta device may not mind."""
_OF_GRADIENTS = frozenset(
    {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
)
_MOVES = frozenset({Tensor.cpu, Tensor.cuda})
_MAY_COPY = _MOVES | {Tensor.to}
"""Functions that return their argument itself where it is on the device that they name."""


class Pending(Tensor):
    """A tensor without a value yet. Mutable: functions that write in place make it another.

    Attributes:
        node: what makes it.
        memory: the pending tensors that lie in the same memory, of those that are still used.
        is_overwritten: whether one of these was written into, which changed this one.
    """

    node: Node
    memory: WeakSet[Pending]
    is_overwritten: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a call of `func`, or call it where all values are there."""
        return applied(func, args, kwargs or {})


def pending(meta: Tensor, node: Node, memory: WeakSet[Pending] | None = None) -> Pending:
    """Return a tensor of the shape of `meta`, which that makes, in a memory of its own or in that
    of others.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        made = Tensor._make_subclass(Pending, meta.detach())
    made.node, made.is_overwritten = node, False
    made.memory = WeakSet() if memory is None else memory
    made.memory.add(made)
    for call in calls_of(node):
        call.made.add(made)
    return made


def returned(metas: Iterable[tuple[Tensor, Output]]) -> list[Pending]:
    """Return what a call returns, of the shapes and in the memory of tensors on the meta device."""
    made: list[tuple[Tensor, Pending]] = []
    for meta, node in metas:
        memory = next((p.memory for m, p in made if _share(m, meta)), None)
        made.append((meta, pending(meta, node, memory)))
    return [each for _, each in made]


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on the meta device lie in the same memory."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def real(tensor: Pending) -> Tensor:
    """Return the value of a tensor; raise PlanError where it has none."""
    missing: dict[Call, set[int]] = {}
    for output in outputs_of(tensor.node, unknown=True):
        missing.setdefault(output.call, set()).add(output.number)
    for call, numbers in missing.items():
        call.need(numbers)
    value: Tensor = value_of(tensor.node)
    return value


def _is_known(tensor: Pending) -> bool:
    return next(outputs_of(tensor.node, unknown=True), None) is None


def applied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` makes: pending, where its arguments are."""
    if (told := _told(func, args)) is not NotImplemented:
        return told
    if func in _OF_GRADIENTS:
        raise PlanError(
            f"{func.__name__} of what the model returned: its gradient lies in the engine; put "
            "what changes or reads it into the model's forward"
        )
    if func is Tensor.backward and isinstance(args[0], Pending):
        calls = calls_of(args[0].node)
        if not (_is_known(args[0]) and all(call.trains for call in calls)):
            (call,) = _single(calls)
            call.backward(args[0], args[1:], kwargs)
            return None
    if any(isinstance(leaf, Left) for leaf in tree_leaves((args, kwargs))):
        refuse_left()
    args, kwargs = tree_map_only(Pending, _real_if_known, (args, kwargs))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Pending)]
    if not given:
        return func(*args, **kwargs)
    if func not in _READS:
        made = _noted(func, args, kwargs)
        if made is not NotImplemented:
            return made
    _refuse_overwritten(given)
    args, kwargs = tree_map_only(Pending, real, (args, kwargs))
    return func(*args, **kwargs)


def _refuse_overwritten(given: Iterable[Any]) -> None:
    for leaf in given:
        if isinstance(leaf, Pending) and leaf.is_overwritten:
            with torch._C.DisableTorchFunctionSubclass():
                shape = list(leaf.shape)
            raise PlanError(
                f"a tensor of shape {shape} is used behind a write into another one that lies in "
                "its memory (a view, or what it is a view of), before the backward; use the one "
                "that was written into, or write into a clone"
            )


def _single(calls: set[Call]) -> set[Call]:
    if len(calls) != 1:
        raise PlanError(
            f"a loss of {len(calls)} calls of the model has one backward, and the engine trains "
            "on the batch of a call; call backward for each loss (gradients add up)"
        )
    return calls


def _real_if_known(tensor: Pending) -> Tensor:
    return real(tensor) if _is_known(tensor) and not tensor.is_overwritten else tensor


def _told(func: Any, args: tuple[Any, ...]) -> Any:
    """Return what can be told of a pending tensor without its value."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if getattr(func, "__name__", "") != "__get__" or not args or not isinstance(args[0], Pending):
        return NotImplemented
    if name == "device":
        return next(iter(calls_of(args[0].node))).device
    if name in ("is_meta", "is_leaf"):
        return False
    if name == "is_cuda":
        return next(iter(calls_of(args[0].node))).device.type == "cuda"
    if name == "requires_grad":
        return all(call.trains for call in calls_of(args[0].node))
    if name in ("grad", "grad_fn"):
        return None
    return NotImplemented


def _noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of shapes, noted; NotImplemented where it needs values."""
    copies = {
        id(leaf): (leaf, _meta(leaf))
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    }
    made = _on_meta(func, *tree_map_only(Tensor, lambda t: copies[id(t)][1], (args, kwargs)))
    if made is NotImplemented:
        return made
    written = [given for given, copy in copies.values() if copy._version]
    targets = [given for given in written if isinstance(given, Pending)]
    if len(targets) < len(written) or len(targets) > 1:
        return NotImplemented
    leaves = tree_leaves(made)
    if targets or any(isinstance(leaf, Tensor) for leaf in leaves):
        _refuse_overwritten(given for given, _ in copies.values())
    nodes, named = tree_map_only(Pending, lambda tensor: tensor.node, (args, kwargs))
    own = AsGiven(leaf for leaf, _ in copies.values() if not isinstance(leaf, Pending))
    has_grad = torch.is_grad_enabled()
    if targets:
        (target,) = targets
        copy = copies[id(target)][1]
        if any(isinstance(leaf, Tensor) and leaf is not copy for leaf in leaves):
            return NotImplemented
        at = next(n for n, leaf in enumerate(tree_leaves((args, kwargs))) if leaf is target)
        target.node = Applied(func, nodes, named, own, at, has_grad, target.dim())
        for other in target.memory:
            other.is_overwritten = other is not target
        return tree_map(lambda leaf: target if isinstance(leaf, Tensor) else leaf, made)
    is_alone = isinstance(made, Tensor)
    numbers = iter(range(len(leaves)))

    def item(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, Tensor):
            return leaf
        source = next((given for given, copy in copies.values() if copy is leaf), None)
        if isinstance(source, Pending) and func not in _MAY_COPY:
            return source  # (itself, as in `contiguous`)
        node = Applied(
            func, nodes, named, own, None, has_grad, leaf.dim(), None if is_alone else number
        )
        shared = (
            given.memory
            for given, copy in copies.values()
            if isinstance(given, Pending) and _share(copy, leaf)
        )
        return pending(leaf, node, next(shared, None))

    return tree_map(item, made)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.inference_mode(False):
        try:
            if func in _MOVES:
                return args[0]
            with StaysOnMeta():
                return func(*args, **kwargs)
        except Exception:  # told of the real values
            return NotImplemented


def _meta(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        like = tensor.as_subclass(Tensor) if isinstance(tensor, Pending) else tensor
        return torch.empty_like(like, device="meta")
