"""One block run forward and backward, op by op, without ever holding all gradients of parameters.

The program is the FX graph that ranks run (`planner.runtime.stage.program_fx`). Each op keeps a
graph of its own for the backward. The gradient of a parameter is not made when the backward
passes it: what it is made of is kept (the op and the gradient of its result, both of the size of
activations), so a caller makes the gradient of one parameter at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from planner.language.graph import Program
from planner.runtime.process import collectives
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.calls.exchanges.table_rows import exchanged_embedding

_TALKS_IN_BACKWARD: frozenset[Callable[..., Any]] = frozenset(
    [
        collectives.redistribute,
        exchanged_embedding,
        local_ops.ring_attention,
        local_ops.vocab_log_softmax,
    ]
)
"""Ops whose gradients ranks make together, so when the backward comes to them."""


@dataclass(kw_only=True)
class _Ran:
    """An op that ran: what it took, as leaves of its own graph, and what it made."""

    taken: dict[fx.Node, Tensor]
    made: tuple[Any, ...]


@dataclass(kw_only=True)
class ParamGradient:
    """A parameter's gradient, made when `make` is called. Mutable: terms are added."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: list[Callable[[], Tensor | None]] = field(default_factory=list)

    def make(self) -> Tensor:
        """Return it: zeros where nothing reached the parameter."""
        total: Tensor | None = None
        for term in self.terms:
            found = term()
            if found is not None:
                total = found if total is None else total.add_(found)
        return torch.zeros(self.shape, dtype=self.dtype) if total is None else total


class BlockRun:
    """A block's program on one rank, forward and then backward. Mutable: what ops made."""

    def __init__(self, module: fx.GraphModule, program: Program) -> None:
        """`module` is what the program became."""
        self._module, self._program = module, program
        nodes = list(module.graph.nodes)
        self._ops = [node for node in nodes if node.op in ("call_function", "call_module")]
        (self._end,) = (node for node in nodes if node.op == "output")
        names = (*program.inputs, *program.params)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._placed = dict(zip(placeholders, names, strict=True))
        self._ran: dict[fx.Node, _Ran] = {}
        self._values: dict[fx.Node, Any] = {}
        self._flows: set[fx.Node] = set()

    def forward(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, given inputs and params by name."""
        for node, name in self._placed.items():
            self._values[node] = values[name]
            if self._program.tensor[name].requires_grad:
                self._flows.add(node)
        for node in self._ops:
            if node.target is operator.getitem:
                source, index = node.args
                self._values[node] = self._values[source][index]
                if source in self._flows and _differentiable(self._ran[source].made[index]):
                    self._flows.add(node)
                continue
            self._run(node)
        return tuple(self._values[node] for node in self._end.args[0])

    def _run(self, node: fx.Node) -> None:
        taken: dict[fx.Node, Tensor] = {}

        def value(source: fx.Node) -> Any:
            if source not in self._flows:
                return self._values[source]
            if source not in taken:
                # A leaf: each op has a graph of its own, which can go as soon as its backward has
                # run.
                taken[source] = self._values[source].detach().requires_grad_()
            return taken[source]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        function = node.target
        if isinstance(function, str):
            function = self._module.get_submodule(function)
        with torch.enable_grad():
            result = function(*args, **kwargs)
        many = isinstance(result, list | tuple)
        made = tuple(result) if many else (result,)
        detached = tuple(m.detach() if isinstance(m, Tensor) else m for m in made)
        self._values[node] = detached if many else detached[0]
        if any(map(_differentiable, made)):
            self._flows.add(node)
            self._ran[node] = _Ran(taken=taken, made=made)

    def backward(
        self, cotangents: Sequence[Tensor | None]
    ) -> tuple[dict[str, Tensor | None], dict[str, ParamGradient]]:
        """Return the gradients of inputs, and of params to be made, by name.

        `cotangents` are those of the outputs, None for an output that has none.
        """
        grads: dict[fx.Node, dict[int, Tensor]] = {}
        params: dict[str, ParamGradient] = {}
        for node, name in self._placed.items():
            meta = self._program.tensor[name]
            if name in self._program.params and meta.requires_grad:
                tensor = self._values[node]
                params[name] = ParamGradient(shape=tuple(tensor.shape), dtype=tensor.dtype)

        def add(node: fx.Node, grad: Tensor) -> None:
            index = 0
            if node.op == "call_function" and node.target is operator.getitem:
                node, index = node.args  # type: ignore[assignment]
            found = grads.setdefault(node, {})
            found[index] = found[index] + grad if index in found else grad

        for node, cotangent in zip(self._end.args[0], cotangents, strict=True):
            if cotangent is not None and node in self._flows:
                add(node, cotangent)
        for node in reversed(self._ops):
            if node in self._ran and node in grads:
                self._back(node, grads.pop(node), add, params)
            self._ran.pop(node, None)
        found = {name: grads.get(node, {}).get(0) for node, name in self._placed.items()}
        for name, gradient in params.items():
            passed = found[name]
            if passed is not None:  # (of ops that talk, or a parameter handed out as it is)
                gradient.terms.append(passed.clone)
        return {name: found[name] for name in self._program.inputs}, params

    def _back(
        self,
        node: fx.Node,
        grads: Mapping[int, Tensor],
        add: Callable[[fx.Node, Tensor], None],
        params: Mapping[str, ParamGradient],
    ) -> None:
        ran = self._ran[node]
        roots = tuple(ran.made[index] for index in grads)
        given = tuple(grads.values())
        later = {
            source: params[self._placed[source]]
            for source in ran.taken
            if source in self._placed
            and self._placed[source] in params
            and node.target not in _TALKS_IN_BACKWARD
        }
        for source, gradient in later.items():
            gradient.terms.append(_term(roots, ran.taken[source], given))
        # Gradients of activations are needed at once, those of parameters when they are asked for;
        # these walk the same graph again, so it is retained.
        now = [source for source in ran.taken if source not in later]
        if not now:
            return
        leaves = [ran.taken[source] for source in now]
        found = torch.autograd.grad(
            roots, leaves, given, allow_unused=True, retain_graph=bool(later)
        )
        for source, grad in zip(now, found, strict=True):
            if grad is not None:
                add(source, grad)


def _term(
    roots: tuple[Tensor, ...], leaf: Tensor, given: tuple[Tensor, ...]
) -> Callable[[], Tensor | None]:
    def make() -> Tensor | None:
        (grad,) = torch.autograd.grad(roots, leaf, given, allow_unused=True, retain_graph=True)
        return grad

    return make


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
