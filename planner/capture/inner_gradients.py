"""Gradients that a forward takes itself (`torch.autograd.grad`), as ops of the captured graph.

torch.export follows ops above autograd. What autograd runs for an inner gradient reads tensors that
it saved below (a linear layer's transposed weight, a tanh's result), which are none that an op of
the graph made. So while a model is exported, an inner gradient is derived from the graph itself,
in reverse mode: from the results back to the inputs, each op on the way adds the ops of its own
derivative.

    y = tanh(x W)       the graph so far
    s = y.sum()
    g = grad(s, x)      is:   a = full_like(y, 1);  b = a * (1 - y * y);  g = b W^T

The derivative of an op is PyTorch's: autograd runs it once for that op alone, on tensors without
values, below which its ops are traced, and those that are derivatives are decomposed into plain
arithmetic, which sharding rules divide. It reads results of the graph's ops, so a loss of the
gradient trains through it a second time, and it may be differentiated again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_meta,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map

from planner.capture.checks.functions import draws
from planner.capture.checks.on_meta.outside_modes import outside_modes
from planner.capture.diagnose import calling_line, node_line
from planner.errors import CaptureError


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return grad * torch.sigmoid(-x)  # smooth at 0, as the usual one with |x| is not


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """The gradient of the input alone: a convolution the other way round."""
    if any(output_mask[1:]):
        return NotImplemented
    more = [0] * len(stride)
    if not transposed:
        sides = zip(
            x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
        more = [
            size - ((made - 1) * step - 2 * pad + apart * (kernel - 1) + 1)
            for size, made, kernel, step, pad, apart in sides
        ]
    made = torch.ops.aten.convolution.default(
        grad, weight, None, stride, padding, dilation, not transposed, more, groups
    )
    return made, None, None


_DECOMPOSED = {
    op: rule
    for op, rule in decomposition_table.items()
    if isinstance(op, torch._ops.OpOverload) and "_backward" in op.name()
} | {
    torch.ops.aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
"""Ops of derivatives, in plain arithmetic."""

_CONSTANT = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
"""Through which no gradient flows."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Of memory that may lie otherwise where the graph runs."""


def inner_gradient(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...] | None:
    """Return what `torch.autograd.grad` does, as tensors of the graph that is being exported.

    None where no graph is: autograd itself answers then. Raises CaptureError where the derivative
    of an op can't be an op of a graph, or there is none.
    """
    mode = get_proxy_mode()
    if mode is None:
        return None
    if is_grads_batched:
        raise CaptureError(
            f"forward calls torch.autograd.grad{calling_line()} with is_grads_batched=True, a "
            "transform, which can't be planned; call it once for each"
        )
    ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or ())
    given += [None] * (len(ends) - len(given))
    reverse = _Reverse(mode.tracer)
    found = reverse.run(ends, asked, given)
    made: list[Tensor | None] = []
    for tensor, grad in zip(asked, found, strict=True):
        if grad is not None:
            made.append(reverse.tracked(grad, has_gradient=create_graph))
        elif materialize_grads:
            made.append(torch.zeros_like(tensor))
        elif allow_unused:
            made.append(None)
        else:
            raise CaptureError(
                f"forward calls torch.autograd.grad{calling_line()} for a tensor that the result "
                "was not made of; pass allow_unused=True, as one process needs it, too"
            )
    return tuple(made)


class _Reverse:
    """Reverse mode over the graph of a tracer. Mutable: the graph grows."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._graph: Graph = tracer.graph
        self._grads: dict[Node, Node] = {}
        self._written = _writes(self._graph)
        self._module: Any = None
        """Of the op whose derivative is being added: what is added is that module's."""

    def run(
        self, ends: Sequence[Tensor], asked: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Node | None]:
        """Return the node of the gradient of each tensor that is asked for; None without one."""
        end_nodes, asked_nodes = ([self._node(t) for t in each] for each in (ends, asked))
        path = _between(self._graph, asked_nodes, end_nodes)
        for end, value, grad in zip(end_nodes, ends, given, strict=True):
            if end in path or end in asked_nodes:
                self._module = end.meta.get("nn_module_stack")
                self._add(end, self._ones(value) if grad is None else self._node(grad))
        with _plainly():
            for node in reversed(path):
                self._step(node, {*path, *asked_nodes}, asked_nodes)
        return [self._grads.get(node) for node in asked_nodes]

    def _refuse_overwritten(self, node: Node, before: int | None = None) -> None:
        """Raise where what a node made was written over since, up to the op at a position."""
        found = self._written.get(_memory(node))
        if found is None:
            return
        made, writes = found[0][node], found[1]
        if any(made < at and (before is None or at < before) for at in writes):
            raise CaptureError(
                f"forward takes a gradient{calling_line()} that reads what was made"
                f"{node_line(node)} and written in place since; write the out-of-place form"
            )

    def tracked(self, node: Node, *, has_gradient: bool) -> Tensor:
        """Return a tensor that stands for a node of the graph."""
        if not has_gradient:
            value = node.meta["val"]
            node = self._emit(torch.ops.aten.detach.default, (node,), {}, like=value)
        with _plainly():
            made: Tensor = torch.empty_like(node.meta["val"])
            if has_gradient:
                made = made.requires_grad_().clone()
        track_tensor_tree(made, Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        return made

    def _position(self, node: Node) -> int | None:
        found = self._written.get(_memory(node))
        return None if found is None else found[0].get(node)

    def _node(self, tensor: Tensor) -> Node:
        slot = get_proxy_slot(tensor, self._tracer, None)
        if slot is None:
            raise CaptureError(
                f"forward takes a gradient{calling_line()} of or for a tensor that none of its ops "
                "made; make it in the forward, or pass it with the batch"
            )
        node: Node = slot.proxy.node
        return node

    def _emit(self, target: Any, args: Any, kwargs: Any, *, like: Any) -> Node:
        """Add an op to the graph; its result is like a tensor, or several."""

        def proxied(value: Any) -> Any:
            return Proxy(value, self._tracer) if isinstance(value, Node) else value

        proxy = self._tracer.create_proxy(
            "call_function", target, tree_map(proxied, args), tree_map(proxied, kwargs)
        )
        set_meta(proxy, like)
        node: Node = proxy.node
        if self._module is not None:
            node.meta["nn_module_stack"] = self._module
        return node

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add an op of tensors that are there."""
        if target is torch.ops.aten.t.default and args[0].target is target:
            turned: Node = args[0].args[0]
            return turned
        with _plainly():
            value = target(*_values(args), **_values(kwargs))
        if isinstance(value, list | tuple) and None in value:
            raise CaptureError(
                f"forward takes a gradient{calling_line()} by {target}, of which a plan can't hold "
                "a part; take it of the inputs alone, or write it with other operations"
            )
        return self._emit(target, args, kwargs, like=value)

    def _ones(self, value: Tensor) -> Node:
        with _plainly():
            like = torch.ones_like(value)
        named = {"dtype": value.dtype, "device": value.device}
        return self._emit(torch.ops.aten.full.default, (list(value.shape), 1.0), named, like=like)

    def _add(self, node: Node, grad: Node) -> None:
        known = self._grads.get(node)
        self._grads[node] = (
            grad if known is None else self._call(torch.ops.aten.add.Tensor, known, grad)
        )

    def _step(self, node: Node, differentiable: set[Node], asked: Sequence[Node]) -> None:
        """Add the derivative of one op, and what it gives to each of its inputs."""
        if node.target is operator.getitem or node in asked:
            return  # a part of an op's results: the op itself takes its gradient
        parts = [user for user in node.users if user.target is operator.getitem]
        several = isinstance(node.meta["val"], list | tuple)
        if several:
            grads = {user.args[1]: self._grads.get(user) for user in parts}
            grads_of = [grads.get(index) for index in range(len(node.meta["val"]))]
        else:
            grads_of = [self._grads.get(node)]
        if all(grad is None for grad in grads_of):
            return
        target = _pure(node)
        for each in node.all_input_nodes:
            if each in differentiable:
                self._refuse_overwritten(each, self._position(node))
        wanted = [each for each in node.all_input_nodes if each in differentiable]
        self._module = node.meta.get("nn_module_stack")
        for into, grad in self._derived(node, target, wanted, grads_of, parts):
            self._add(into, grad)

    def _derived(
        self,
        node: Node,
        target: Any,
        wanted: Sequence[Node],
        grads: Sequence[Node | None],
        parts: Sequence[Node],
    ) -> Iterator[tuple[Node, Node]]:
        """Yield each input of an op with the node of its gradient."""
        given = [grad for grad in grads if grad is not None]
        others = node.all_input_nodes
        try:
            traced = _traced_derivative(node, target, wanted, [g is not None for g in grads])
        except Exception as error:
            raise CaptureError(
                f"forward takes a gradient{calling_line()} through {target}{node_line(node)}, "
                f"which has no derivative that a plan can hold ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}); write it with other "
                "operations"
            ) from error
        there: dict[Node, Node | None] = {}
        placeholders = [each for each in traced.graph.nodes if each.op == "placeholder"]
        there |= dict(zip(placeholders, [*given, *others], strict=True))
        (ends,) = (each for each in traced.graph.nodes if each.op == "output")
        made, gradients = ends.args[0][: -len(wanted)], ends.args[0][-len(wanted) :]
        results = {part.args[1]: part for part in parts} if parts else {0: node}
        # What the op made is in the graph already.
        for index, result in enumerate(made):
            if isinstance(result, Node) and index in results:
                for alias in _aliases(result):
                    there.setdefault(alias, results[index])
        for wish, gradient in zip(wanted, gradients, strict=True):
            if isinstance(gradient, Node):
                self._copy(gradient, there)
                copied = there[gradient]
                assert copied is not None
                yield wish, copied

    def _copy(self, wish: Node, there: dict[Node, Node | None]) -> None:
        """Add a traced op to the graph, after those that it reads."""
        stack = [wish]
        while stack:
            node = stack[-1]
            missing = [each for each in node.all_input_nodes if each not in there]
            if node in there:
                stack.pop()
            elif missing:
                stack += missing
            else:
                stack.pop()
                there[node] = self._copied(node, there)

    def _copied(self, node: Node, there: dict[Node, Node | None]) -> Node | None:
        if node.target in _CONSTANT:  # autograd's own, of what it saved: its gradient flows on
            return there[node.args[0]]  # type: ignore[index]
        for each in node.all_input_nodes:
            known = there[each]
            assert known is not None
            self._refuse_overwritten(known)
        args = torch.fx.map_arg(node.args, lambda each: there[each])
        kwargs = torch.fx.map_arg(node.kwargs, lambda each: there[each])
        if node.op == "get_attr":  # a number as a tensor
            value = getattr(node.graph.owning_module, str(node.target))
            return self._number(value)
        if node.target is operator.getitem:
            values = _values(args)
            return self._emit(operator.getitem, args, {}, like=values[0][values[1]])
        target = torch.ops.aten.reshape.default if node.target in _VIEWS else node.target
        return self._call(target, *args, **kwargs)

    def _number(self, value: Tensor) -> Node:
        if value.dim() or value.is_meta:
            raise CaptureError(
                f"forward takes a gradient{calling_line()} that reads a constant of shape "
                f"{tuple(value.shape)}; write it with other operations"
            )
        with _plainly():
            like = torch.empty((), dtype=value.dtype, device="meta")
        named = {"dtype": value.dtype, "device": like.device}
        return self._emit(torch.ops.aten.full.default, ([], value.item()), named, like=like)


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _writes(graph: Graph) -> dict[int | None, tuple[dict[Node, int], list[int]]]:
    """Return of memory that ops write in place: who else made something of it, and the writes.

    Both by their positions in the graph.
    """
    of_memory: dict[int | None, tuple[dict[Node, int], list[int]]] = {}
    written: set[int | None] = set()
    for position, node in enumerate(graph.nodes):
        memory = _memory(node)
        known = of_memory.setdefault(memory, ({}, []))
        known[0][node] = position
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            known[1].append(position)
            written.add(memory)
    return {memory: of_memory[memory] for memory in written - {None}}


def _between(graph: Graph, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
    """Return the nodes on the ways from `starts` to `ends`, in order, through which gradients flow.

    `starts` themselves are among them where one is made of another.
    """
    reached: set[Node] = set(starts)
    is_enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            is_enabled = bool(node.args[0])
        elif is_enabled and _carries(node) and reached.intersection(node.all_input_nodes):
            reached.add(node)
    needed: set[Node] = set(ends)
    for node in reversed(list(graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
    starting = set(starts)
    return [
        node
        for node in graph.nodes
        if node in reached
        and node in needed
        and (node not in starting or reached.intersection(node.all_input_nodes))
    ]


def _carries(node: Node) -> bool:
    """Whether what a node makes may have a gradient."""
    if node.target in _CONSTANT:
        return False
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    return any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        for value in values
    )


def _pure(node: Node) -> Any:
    """Return the op of a node in the form that writes nothing. Raises CaptureError without one."""
    target = node.target
    where = f"forward takes a gradient{calling_line()} through {target}{node_line(node)}"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise CaptureError(
            f"{where}, whose derivative is a function of its own, which a plan can't derive again; "
            "write it with plain tensor operations"
        )
    if draws(target, node.args, node.kwargs) and not _is_in_evaluation(node):
        raise CaptureError(
            f"{where}, which draws random numbers inside; draw them by an op of their own, for "
            "dropout x * (torch.rand_like(x) >= p) / (1 - p)"
        )
    if not target._schema.is_mutable:
        return target
    packet = target._schema.name.split("::")[1]
    pure = getattr(torch.ops.aten, packet.removesuffix("_"), None)
    found = getattr(pure, target._overloadname, None)
    if not packet.endswith("_") or found is None or packet in ("copy_", "set_", "resize_"):
        raise CaptureError(f"{where}, which writes in place; write the out-of-place form")
    return found


def _is_in_evaluation(node: Node) -> bool:
    """Whether a dropout drops nothing."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("train") is False or given.get("p") == 0)


def _traced_derivative(
    node: Node, target: Any, wanted: Sequence[Node], has_grad: Sequence[bool]
) -> GraphModule:
    """Trace an op and its derivative, given the gradients of results and the op's inputs.

    The graph returns the op's results and a gradient for each of `wanted`.
    """
    values = node.meta["val"]
    values = values if isinstance(values, list | tuple) else [values]
    others = node.all_input_nodes
    # Equal layers have equal derivatives.
    place = {other: f"input {index}" for index, other in enumerate(others)}
    key = (
        target,
        repr(torch.fx.map_arg((node.args, node.kwargs), place.__getitem__)),
        tuple(map(_told, (*(other.meta["val"] for other in others), *values))),
        tuple(place[wish] for wish in wanted),
        tuple(has_grad),
    )
    if key not in _traced:
        if len(_traced) >= _MOST_TRACED:
            _traced.clear()
        given = [_empty(value) for value, has in zip(values, has_grad, strict=True) if has]
        _traced[key] = _traced_of(node, target, wanted, has_grad, given)
    return _traced[key]


_traced: dict[Any, GraphModule] = {}
_MOST_TRACED = 1000


def _told(value: Any) -> Any:
    """Return what a derivative may depend on of what an op is given or makes."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _traced_of(
    node: Node,
    target: Any,
    wanted: Sequence[Node],
    has_grad: Sequence[bool],
    given: Sequence[Tensor],
) -> GraphModule:
    others = node.all_input_nodes
    args, kwargs = node.args, node.kwargs
    target = _PLAIN.get(target, target)

    def run(grads: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
        own = {
            other: tensor.detach().requires_grad_(other in wanted)
            for other, tensor in zip(others, tensors, strict=True)
        }
        with torch.enable_grad():
            made = target(
                *torch.fx.map_arg(args, own.__getitem__),
                **torch.fx.map_arg(kwargs, own.__getitem__),
            )
            results = list(made) if isinstance(made, list | tuple) else [made]
            given = iter(grads)
            ends = [
                (result, next(given)) for result, has in zip(results, has_grad, strict=True) if has
            ]
            ends = [(result, grad) for result, grad in ends if result.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if ends:  # else it makes what is like another (ones_like)
                found = torch.autograd.grad(
                    [result for result, _ in ends],
                    [own[wish] for wish in wanted],
                    [grad for _, grad in ends],
                    allow_unused=True,
                )
        return (*(result.detach() for result in results), *found)

    empty = list(given), [_empty(other.meta["val"]) for other in others]

    def trace(rules: dict[Any, Any]) -> GraphModule:
        traced = make_fx(run, decomposition_table=rules, tracing_mode="real")(*empty)
        assert isinstance(traced, GraphModule)
        traced.graph.eliminate_dead_code()
        return traced

    traced = trace(_DECOMPOSED)
    apart = _apart_from_derivatives(traced.graph)
    if not apart:
        return traced
    # What a derivative reads beside an op's results depends on its inputs, too: the op itself in
    # plain arithmetic says how. Else derivatives stay ops, which have derivatives of their own.
    if apart <= decomposition_table.keys():
        traced = trace(_DECOMPOSED | {op: decomposition_table[op] for op in apart})
        if not _apart_from_derivatives(traced.graph):
            return traced
    return trace({})


def _apart_from_derivatives(graph: Graph) -> set[Any]:
    """Return the ops whose results without a gradient are read as if they were constants."""
    found = set()
    for node in graph.nodes:
        if node.target is not operator.getitem:
            continue
        maker, index = node.args
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        readers = [
            user
            for user in node.users
            if user.op == "call_function"
            and user.target not in _CONSTANT
            and "_backward" not in str(user.target)
        ]
        readers += [
            user
            for alias in node.users
            if alias.target in _CONSTANT
            for user in alias.users
            if user.op == "call_function" and "_backward" not in str(user.target)
        ]
        if readers and not _is_differentiable(maker, index):
            found.add(maker.target)
    return found


def _is_differentiable(maker: Node, index: int) -> bool:
    """Whether a result of an op has a gradient."""

    def given(node: Node) -> Any:
        value = node.meta["val"]
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return _empty(value).requires_grad_(is_float) if isinstance(value, Tensor) else value

    with _plainly():
        made = maker.target(  # type: ignore[operator]
            *torch.fx.map_arg(maker.args, given), **torch.fx.map_arg(maker.kwargs, given)
        )
    return bool(made[index].requires_grad)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """A batch norm in plain arithmetic, which moves no running statistics a second time."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training or mean is None or variance is None:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        middle = x.mean(dims, keepdim=True)
        centred = x - middle
        spread = centred.square().mean(dims, keepdim=True)
    else:
        centred, spread = x - mean.reshape(shape), variance.reshape(shape)
    made = centred * torch.rsqrt(spread + eps)
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape)


_PLAIN = {torch.ops.aten.batch_norm.default: _batch_norm}
"""Ops whose derivative is that of the same in other ops."""


def _aliases(node: Node) -> Iterator[Node]:
    """Yield a traced node and those that it is a detached alias of."""
    yield node
    while node.target in _CONSTANT:
        (source,) = node.all_input_nodes
        yield source
        node = source


def _empty(value: Tensor) -> Tensor:
    return torch.empty_strided(
        [int(size) for size in value.shape], value.stride(), dtype=value.dtype, device="meta"
    )


def _values(args: Any) -> Any:
    return torch.fx.map_arg(args, lambda node: node.meta["val"])


@contextmanager
def _plainly() -> Iterator[None]:
    """Run ops as they are, seen by no mode and by none of torch's dispatchers in Python."""
    with outside_modes(), torch._C._DisablePythonDispatcher():
        yield
