"""A loss that a script computes from what its model returns: what it is, and a module that has it.

The innermost scalar on the way from the model to the `backward` is the loss; what is computed with
it alone behind that (a division by the number of batches of an update) is its factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from planner.errors import PlanError
from planner.integrations.script.values.notes import Applied, Node, Output, computed, nodes_in
from planner.integrations.script.values.outputs import Outputs


class Loss:
    """A loss of one call.

    Attributes:
        node: what computes it; None where the model returns it.
        targets: the tensors that it is given beside what the model returns, in their order.
        outputs: what of the model it is given.
        signature: equal for losses that are computed alike.
    """

    def __init__(self, node: Node | None) -> None:
        self.node = node if isinstance(node, Applied) else None
        self.targets: list[Tensor] = []
        self.outputs: list[Output] = []
        self.signature: Any = None
        if self.node is not None:
            self.signature = self._of(self.node, {})

    def _of(self, node: Node, seen: dict[int, int]) -> Any:
        if id(node) in seen:
            return ("again", seen[id(node)])
        seen[id(node)] = len(seen)
        if isinstance(node, Output):
            self.outputs.append(node)
            return ("output", node.number)

        node.given.refuse_written()

        def leaf(value: Any) -> Any:
            if isinstance(value, Output | Applied):
                return self._of(value, seen)
            if isinstance(value, Tensor):
                _refuse_gradient(value)
                if not any(value is target for target in self.targets):
                    self.targets.append(value)
                return ("target", [value is target for target in self.targets].index(True))
            return (type(value).__name__, repr(value))

        given = [leaf(value) for value in tree_leaves((node.args, node.kwargs))]
        names = tuple(node.kwargs)
        return (node.function, given, len(node.args), names, node.writes, node.item)

    def trained(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> nn.Module:
        """Return a module with the tensors of `model` that returns the loss of a batch, whose
        tensors are given by path, in order; the targets are among them.
        """
        if self.node is None:
            return model
        paths = {id(tensor): path for path, tensor in leaves.items()}
        node = self.node
        kind = type(model)
        numbers = {id(target): paths[id(target)] for target in self.targets}
        leaves_in_order = tuple(leaves)
        order = [path for path in leaves_in_order if path not in numbers.values()]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = dict(kwargs)
            given |= dict(zip(leaves_in_order, args, strict=False))
            targets = {key: given.pop(path) for key, path in numbers.items()}
            if args:
                output = kind.forward(self, *(given[path] for path in order))
            else:
                output = kind.forward(self, **given)
            return _computed(node, tree_leaves(output), targets, {})

        made: nn.Module = object.__new__(type(kind.__name__, (kind,), {"forward": forward}))
        # (The same dicts of tensors and parts: what is taken away from one, the other has not.)
        vars(made).update(vars(model))
        return made


def _refuse_gradient(target: Tensor) -> None:
    if target.requires_grad:
        raise PlanError(
            f"the loss is computed from a tensor of shape {list(target.shape)} beside the model "
            "that requires a gradient, which the engine does not compute: it has those of the "
            "model's own parameters; make it a parameter of the model, whose forward returns the "
            "loss, or give the loss tensor.detach()"
        )


def _computed(
    node: Node, outputs: list[Any], targets: Mapping[int, Tensor], done: dict[int, Any]
) -> Any:
    """Compute what was noted from other outputs and targets."""
    if isinstance(node, Output):
        return outputs[node.number]
    if id(node) not in done:

        def given(value: Any) -> Any:
            if isinstance(value, Output | Applied):
                return _computed(value, outputs, targets, done)
            return targets[id(value)] if isinstance(value, Tensor) else value

        args, kwargs = tree_map(given, (node.args, node.kwargs))
        with torch.enable_grad():
            done[id(node)] = computed(node, args, kwargs)
    return done[id(node)]


def loss_of(node: Node, outputs: Outputs) -> Loss:
    """Return the loss of what a script calls `backward` on."""
    while isinstance(node, Applied):
        inner = nodes_in(node)
        if len(inner) != 1 or inner[0].dims != 0:
            break
        node = inner[0]
    if isinstance(node, Output) and node.number == outputs.loss:
        return Loss(None)
    return Loss(node)
