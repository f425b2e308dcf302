"""Tensors that a call of the model returns before their values are there.

A loop calls the model, computes with what that returns, and calls `backward` on a loss; the engine
does all of this in one step, for which it needs the loss. So a call in training returns tensors
that have shapes, and note what is computed with them. `backward` gives the engine the batch, and
what was noted is then computed from real values, with autograd: the factor that reaches the loss
is that of its gradient in the update. Whoever reads a value earlier lets the step run earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from planner.capture.checks.stays_on_meta import StaysOnMeta
from planner.errors import PlanError


class Call(Protocol):
    """A call of the model, whose outputs are numbered in the order of their structure."""

    @property
    def device(self) -> torch.device:
        """Where the script finds what the model returns."""

    @property
    def trains(self) -> bool:
        """Whether a backward may follow."""

    def is_known(self, output: int) -> bool:
        """Whether the value of an output is there, or is to be made when it is first used."""

    def value(self, output: int) -> Tensor:
        """Return the value of an output; raise PlanError where there is none."""

    def backward(self, loss: Pending, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Train on the batch of the call; further arguments are those of `Tensor.backward`."""

    def need(self, outputs: set[int]) -> None:
        """Make the values of outputs, as they are read; raise PlanError where that can't be."""


@dataclass(slots=True, eq=False)
class Output:
    """An output of a call. Mutable: `value`, once it is there. `dims` counts its dims."""

    call: Call
    number: int
    dims: int
    value: Any = None


@dataclass(slots=True, eq=False)
class Applied:
    """What a function of torch makes of pending tensors. Mutable: `value`, once it is there.

    Attributes:
        function: of `args` and `kwargs`, in which pending tensors are their `Node`.
        writes: whether it writes into its first argument.
        has_grad: whether autograd was on.
        dims: how many dims that has.
        item: which of what it returns this is; None: all.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool
    has_grad: bool
    dims: int
    item: int | None = None
    value: Any = None


Node = Output | Applied

_READS = frozenset(
    {Tensor.__repr__, Tensor.__format__, Tensor.tolist, Tensor.numpy, Tensor.item,
     Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__array__,
     Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.untyped_storage, Tensor.storage}
)  # fmt: skip
"""Functions that read values though a tensor on the meta device may not mind."""
_MOVES = frozenset({Tensor.cpu, Tensor.cuda})
_WRITES = frozenset(
    getattr(Tensor, f"__i{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    if hasattr(Tensor, f"__i{name}__")
)


class Pending(Tensor):
    """A tensor without a value yet. Mutable: functions that write in place make it another."""

    node: Node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a call of `func`, or call it where all values are there."""
        return applied(func, args, kwargs or {})


def pending(meta: Tensor, node: Node) -> Pending:
    """Return a tensor of the shape of `meta`, which that makes."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        made = Tensor._make_subclass(Pending, meta.detach())
    made.node = node
    return made


def calls_of(node: Node) -> set[Call]:
    """Return the calls that a tensor was made of."""
    return {output.call for output in outputs_of(node)}


def outputs_of(node: Node, *, unknown: bool = False) -> Iterator[Output]:
    """Yield the outputs of calls that a tensor was made of; of the `unknown`, those without whose
    values it has none.
    """
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or (unknown and each.value is not None):
            continue
        seen.add(id(each))
        if isinstance(each, Applied):
            waiting += nodes_in(each)
        elif not (unknown and each.call.is_known(each.number)):
            yield each


def nodes_in(applied: Applied) -> list[Node]:
    """Return what a function was given that was pending."""
    leaves = tree_leaves((applied.args, applied.kwargs))
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Output | Applied)))


def value_of(node: Node) -> Any:
    """Return the value of what was noted, made of the values of outputs."""
    if node.value is None:
        if isinstance(node, Output):
            node.value = node.call.value(node.number)
        else:
            args, kwargs = tree_map_only((Output, Applied), value_of, (node.args, node.kwargs))
            node.value = computed(node, args, kwargs)
    return node.value


def computed(node: Applied, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of values."""
    if node.writes:  # (into a copy: the value before is that of another note)
        args = (args[0].clone(), *args[1:])
    with torch.set_grad_enabled(node.has_grad):
        made = node.function(*args, **kwargs)
    return made if node.item is None else tree_leaves(made)[node.item]


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
    args, kwargs = tree_map_only(Pending, _real_if_known, (args, kwargs))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Pending)]
    if not given:
        return func(*args, **kwargs)
    if func is Tensor.backward:
        (call,) = _single(calls_of(args[0].node))
        call.backward(args[0], args[1:], kwargs)
        return None
    writes = _writes(func)
    if not (func in _READS or (writes and not isinstance(args[0], Pending))):
        made = _on_meta(func, args, kwargs)
        if made is not NotImplemented:
            return _noted(func, args, kwargs, made, writes=writes)
    args, kwargs = tree_map_only(Pending, real, (args, kwargs))
    return func(*args, **kwargs)


def _single(calls: set[Call]) -> set[Call]:
    if len(calls) != 1:
        raise PlanError(
            f"a loss of {len(calls)} calls of the model has one backward, and the engine trains "
            "on the batch of a call; call backward for each loss (gradients add up)"
        )
    return calls


def _real_if_known(tensor: Pending) -> Tensor:
    return real(tensor) if _is_known(tensor) else tensor


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


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of shapes; NotImplemented where it needs values."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        plain_args, plain = tree_map_only(Tensor, _meta, (args, kwargs))
        try:
            if func in _MOVES:
                return plain_args[0]
            with StaysOnMeta():
                return func(*plain_args, **plain)
        except Exception:  # told of the real values
            return NotImplemented


def _meta(tensor: Tensor) -> Tensor:
    like = tensor.as_subclass(Tensor) if isinstance(tensor, Pending) else tensor
    return torch.empty_like(like, device="meta")


def _noted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, *, writes: bool
) -> Any:
    nodes, named = tree_map_only(Pending, lambda tensor: tensor.node, (args, kwargs))
    node = Applied(func, nodes, named, writes, torch.is_grad_enabled(), _dims(made))
    if writes:
        args[0].node = node
        return args[0]
    leaves = tree_leaves(made)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return made
    if isinstance(made, Tensor):
        return pending(made, node)
    numbers = iter(range(len(leaves)))

    def item(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, Tensor):
            return leaf
        part = Applied(func, nodes, named, writes, node.has_grad, leaf.dim(), number)
        return pending(leaf, part)

    return tree_map(item, made)


def _dims(made: Any) -> int:
    return made.dim() if isinstance(made, Tensor) else -1
