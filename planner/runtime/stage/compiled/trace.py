"""A block's program and its backward as one graph of ATen calls: what autograd would run.

The program runs once on fake tensors, its backward behind it, and every operator is noted.
Products with trained weights defer the weight's gradient, as in a table with W jobs: the graph
hands out both factors of it, (activation, output gradient), and the runtime multiplies them where
they belong (`planner.runtime.stage.weight_grads`). Writes are made functional; a buffer that the
program writes is put back by a copy at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import ProcessGroup

from planner.capture.diagnose import first_line
from planner.language.graph import Program, TensorMeta
from planner.language.ops.record import why_eager
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.stage.weight_grads import Pending, WeightQueue, weight_gradient


class NotCompilable(Exception):
    """A program that no graph holds; the message says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product whose weight's gradient is made outside: x and the output's gradient are [rows, …].

    `weight` is the position of the weight among the program's tensors.
    """

    weight: int
    transposed: bool
    x: fx.Node
    grad: fx.Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A program's forward and backward as one functional graph, on a rank's own shapes."""

    module: fx.GraphModule
    """All nodes are of its graph, forward first; `meta["val"]` has the value, without memory."""
    tensors: tuple[fx.Node, ...]
    """Placeholders of inputs and params, in order."""
    num_inputs: int
    """How many of these are inputs."""
    gradients: tuple[fx.Node, ...]
    """Placeholders of the outputs' gradients: one for each output that has one."""
    forward: frozenset[fx.Node]
    """What the forward makes."""
    op_of: Mapping[fx.Node, str]
    """The op of the program that a node of the forward is of."""
    outputs: tuple[fx.Node, ...]
    """What the program returns."""
    has_gradient: tuple[bool, ...]
    """Of each output."""
    made: tuple[fx.Node | None, ...]
    """By tensor: its gradient; None where it has none here (a product's weight, what is frozen)."""
    products: tuple[Product, ...]
    """Those whose weight's gradient is made outside."""
    writes: tuple[fx.Node, ...]
    """Copies that put written buffers back."""
    needs: tuple[bool, ...]
    """By tensor: whether it was traced as one that needs a gradient."""


def trace(
    program: Program, groups: Mapping[str, ProcessGroup | None], device: torch.device
) -> Joint:
    """Return a bound program's joint graph; raise NotCompilable where none holds it."""
    reason = why_eager(program)
    if reason is not None:
        raise NotCompilable(reason)
    queue = WeightQueue()
    module = to_graph_module(program, groups, device, weight_queue=queue)
    metas = [program.tensor[name] for name in (*program.inputs, *program.params)]
    outs = [program.tensor[name] for name in program.outputs]
    try:
        return _Tracing(module, queue, metas, outs, device).joint(len(program.inputs))
    except Exception as error:  # of anybody's ops, whose work may follow from values
        raise NotCompilable(f"no graph holds it: {first_line(error)}") from error


class _Tracing:
    """One tracing of a program. Mutable: what it finds on the way."""

    def __init__(
        self,
        module: fx.GraphModule,
        queue: WeightQueue,
        tensors: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        device: torch.device,
    ) -> None:
        self._module, self._queue, self._device = module, queue, device
        self._tensors, self._outputs = tensors, outputs
        self._needs = [meta.requires_grad for meta in tensors]
        self._spans: list[tuple[str, int]] = []
        self._has_gradient: list[bool] = []
        self._products: list[tuple[int, bool]] = []
        self._has: list[bool] = []
        self._num_forward = 0
        self._num_written = 0

    def joint(self, num_inputs: int) -> Joint:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), FakeTensorMode(), _compiling():
            tensors = [self._empty(meta) for meta in self._tensors]
            grads = [self._empty(meta) for meta in self._outputs if _is_continuous(meta)]
            run = lambda tensors, grads: self._run(tensors, grads)  # noqa: E731  # make_fx counts arguments
            traced = make_fx(run, tracing_mode="fake")(tensors, grads)
        return self._read(traced, len(tensors), num_inputs)

    def _empty(self, meta: TensorMeta) -> Tensor:
        # Contiguous, as the block that is compiled makes its arguments.
        return torch.empty(meta.shape_at(1), dtype=getattr(torch, meta.dtype), device=self._device)

    def _run(self, tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The program and its backward; all that either makes, in one list."""
        from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

        with FunctionalTensorMode():
            functional = [FunctionalTensor.to_functional(x) for x in tensors]
            given = [FunctionalTensor.to_functional(x) for x in grads]
            made = self._run_functional(functional, given)
        results = [_plain(x) for x in made]
        written = []
        for x, after in zip(tensors, functional, strict=True):
            if torch._functionalize_has_data_mutation(after.elem):  # type: ignore[attr-defined]
                written.append(x.copy_(_plain(after)))
        self._num_written = len(written)
        return [*results, *written]

    def _run_functional(self, tensors: list[Any], grads: list[Any]) -> list[Tensor]:
        leaves = [
            x.detach().requires_grad_() if needs else x
            for x, needs in zip(tensors, self._needs, strict=True)
        ]
        # Autograd walks to what it is asked for: a product of which only the weight has a gradient
        # hangs on this.
        anchor = torch.empty(0, device=self._device, requires_grad=True)
        for part in self._module.children():
            part.anchor = anchor
        with torch.enable_grad(), self._queue.collecting((0, 0)):
            pending = self._queue.current
            assert pending is not None
            outputs = _Noting(self._module, self._spans).run(*leaves)
            self._num_forward = _num_nodes()
            self._has_gradient = [
                x.requires_grad and _is_continuous(meta)
                for x, meta in zip(outputs, self._outputs, strict=True)
            ]
            it = iter(grads)
            pairs = [
                (x, grad)
                for x, meta, has in zip(outputs, self._outputs, self._has_gradient, strict=True)
                if _is_continuous(meta) and (grad := next(it)) is not None and has
            ]
            found = self._gradients(leaves, anchor, pairs, pending)
        self._has = [grad is not None for grad in found]
        factors = [t for p in pending if _at(p.weight, leaves) is not None for t in (p.x, p.grad)]
        return [*outputs, *(grad for grad in found if grad is not None), *factors]

    def _gradients(
        self,
        leaves: list[Tensor],
        anchor: Tensor,
        pairs: list[tuple[Tensor, Tensor]],
        pending: list[Pending],
    ) -> list[Tensor | None]:
        """Gradients of the leaves; of weights of products only those that other ops leave."""
        wanted = [anchor, *(x for x, needs in zip(leaves, self._needs, strict=True) if needs)]
        total: dict[int, Tensor] = {}

        def add(roots: Sequence[tuple[Tensor, Tensor]]) -> None:
            if not roots:
                return
            xs, grads = zip(*roots, strict=True)
            for leaf, grad in zip(
                wanted,
                torch.autograd.grad(xs, wanted, grads, allow_unused=True, retain_graph=True),
                strict=True,
            ):
                if grad is not None:
                    before = total.get(id(leaf))
                    total[id(leaf)] = grad if before is None else before + grad

        add(pairs)
        # Autograd does not see weights and biases of products: what lies behind one (a transpose,
        # a cast) gets its gradient here, and a weight that is a parameter outside.
        hidden: list[tuple[Tensor, Tensor]] = []
        for each in pending:
            at = _at(each.weight, leaves)
            if at is None:
                fresh = weight_gradient(None, each.x, each.grad, transposed=each.transposed)
                assert fresh is not None
                hidden.append((each.weight, fresh))
            else:
                self._products.append((at, each.transposed))
            if each.bias is not None and each.bias.requires_grad:
                hidden.append((each.bias, each.grad.sum(0)))
        add(hidden)
        return [total.get(id(leaf)) for leaf in leaves]

    def _read(self, module: fx.GraphModule, count: int, num_inputs: int) -> Joint:
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        tensors, grads = placeholders[:count], placeholders[count:]
        (results,) = next(node for node in nodes if node.op == "output").args
        results = list(results)
        outputs = results[: len(self._outputs)]
        rest = iter(results[len(self._outputs) :])
        made = tuple(next(rest) if has else None for has in self._has)
        products = tuple(Product(at, way, next(rest), next(rest)) for at, way in self._products)
        op_of: dict[fx.Node, str] = {}
        begin = 0
        for name, end in self._spans:
            op_of |= dict.fromkeys(nodes[begin:end], name)
            begin = end
        continuous = [_is_continuous(meta) for meta in self._outputs]
        given = iter(grads)
        by_output = [next(given) if there else None for there in continuous]
        return Joint(
            module=module,
            tensors=tuple(tensors),
            num_inputs=num_inputs,
            gradients=tuple(
                node
                for node, has in zip(by_output, self._has_gradient, strict=True)
                if has and node is not None
            ),
            forward=frozenset(
                node for node in nodes[: self._num_forward] if node.op == "call_function"
            ),
            op_of={node: name for node, name in op_of.items() if node.op == "call_function"},
            outputs=tuple(outputs),
            has_gradient=tuple(self._has_gradient),
            made=made,
            products=products,
            writes=tuple(rest),
            needs=tuple(self._needs),
        )


class _Noting(fx.Interpreter):
    """Runs a program, noting how many nodes there are in the joint graph after each of its ops."""

    def __init__(self, module: fx.GraphModule, spans: list[tuple[str, int]]) -> None:
        super().__init__(module)
        self._spans, self._lines = spans, module.meta["lines"]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name, _ = self._lines.get(n.name, ("", 0))
        if n.target.__class__.__name__ == "builtin_function_or_method" and self._spans:
            name = name or self._spans[-1][0]  # an item of an op's results
        self._spans.append((name, _num_nodes()))
        return result


def _num_nodes() -> int:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return len(mode.tracer.graph.nodes)


def _plain(x: Any) -> Tensor:
    torch._sync(x)
    plain: Tensor = torch._from_functional_tensor(x.elem)
    return plain


def _at(weight: Tensor, leaves: Sequence[Tensor]) -> int | None:
    return next((i for i, leaf in enumerate(leaves) if leaf is weight), None)


def _is_continuous(meta: TensorMeta) -> bool:
    dtype = getattr(torch, meta.dtype)
    return bool(dtype.is_floating_point or dtype.is_complex)


@contextmanager
def _compiling() -> Iterator[None]:
    """Let calls of ours take the form that a graph holds (`torch.compiler.is_compiling`)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
