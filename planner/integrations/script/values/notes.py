"""What a script made of tensors that have no value yet: which function, of what.

What was noted holds the script's own tensors as they are. A write into one of them, before what was
noted of it is computed, would reach that: it is refused by the tensors' version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from planner.errors import PlanError


class Call(Protocol):
    """A call of the model, whose outputs are numbered in the order of their structure."""

    made: WeakSet[Any]
    """What is still used of the pending tensors that were made of what it returned."""

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

    def backward(self, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Train on the batch of the call; further arguments are those of `Tensor.backward`."""

    def need(self, outputs: set[int]) -> None:
        """Make the values of outputs, as they are read; raise PlanError where that can't be."""


class AsGiven:
    """Tensors as a script gave them: a write into one of them afterwards is told."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]

    def refuse_written(self) -> None:
        """Raise PlanError where one was written into since."""
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise PlanError(
                    f"a tensor of shape {list(tensor.shape)} is written into before the engine "
                    "computes what the script made of it: with a batch, at its backward; give the "
                    "model and its loss a clone, or write behind the backward"
                )


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into; 0 where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True, eq=False)
class Output:
    """An output of a call. Mutable: `value`, once it is there. `dims` counts its dims."""

    call: Call
    number: int
    dims: int
    value: Any = None
    version: int = 0


@dataclass(slots=True, eq=False)
class Applied:
    """What a function of torch makes of pending tensors. Mutable: `value`, once it is there.

    Attributes:
        function: of `args` and `kwargs`, in which pending tensors are their `Node`.
        given: the script's own tensors among the arguments.
        writes: into which of its arguments it writes, as leaves in their order; None: into none.
        has_grad: whether autograd was on.
        dims: how many dims that has.
        item: which of what it returns this is; None: all.
        is_of_loss: whether a backward of what was made of it trained the model.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: AsGiven
    writes: int | None
    has_grad: bool
    dims: int
    item: int | None = None
    value: Any = None
    version: int = 0
    is_of_loss: bool = False


Node = Output | Applied


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


def mark_of_loss(node: Node) -> None:
    """Note that all that a tensor was made of is of a loss."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Applied) and not each.is_of_loss:
            each.is_of_loss = True
            waiting += nodes_in(each)


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
            args, kwargs = tree_map_only((Output, Applied), _unchanged, (node.args, node.kwargs))
            node.value = computed(node, args, kwargs)
        if isinstance(node.value, Tensor):
            node.version = version_of(node.value)
    return node.value


def _unchanged(node: Node) -> Any:
    """Return the value that a note is made of; raise PlanError where it was changed since."""
    value = value_of(node)
    if isinstance(value, Tensor) and version_of(value) != node.version:
        raise PlanError(
            f"the script writes into a tensor of shape {list(value.shape)} that the model "
            "returned, or that was made of it, and reads behind that what it had made of it "
            "before; write into a clone"
        )
    return value


def computed(node: Applied, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of values."""
    node.given.refuse_written()
    written = None
    with torch.set_grad_enabled(node.has_grad):
        if node.writes is not None:  # (into a copy: the value before is that of another note)
            leaves, spec = tree_flatten((args, kwargs))
            written = leaves[node.writes] = leaves[node.writes].clone()
            args, kwargs = tree_unflatten(leaves, spec)
        made = node.function(*args, **kwargs)
    if written is not None:
        return written
    return made if node.item is None else tree_leaves(made)[node.item]
