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

    `weight` is the position of the weight among the program's tensors; `scaling` is that of a
    product in 8 bits.
    """

    weight: int
    transposed: bool
    scaling: str
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
    op_of: Mapping[fx.Node, str]
    """The nodes that the forward makes, and the op of the program that each is of."""
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
    try:
        return _Tracing(program, groups, device).joint()
    except Exception as error:  # of anybody's ops, whose work may follow from values
        raise NotCompilable(f"no graph holds it: {first_line(error)}") from error


class _Tracing:
    """One tracing of a program. Mutable: what it finds on the way."""

    def __init__(
        self, program: Program, groups: Mapping[str, ProcessGroup | None], device: torch.device
    ) -> None:
        self._queue = WeightQueue()
        self._module = to_graph_module(program, groups, device, weight_queue=self._queue)
        self._program, self._device = program, device
        names = *program.inputs, *program.params
        self._tensors = [program.tensor[name] for name in names]
        self._outputs = [program.tensor[name] for name in program.outputs]
        self._needs = [meta.requires_grad for meta in self._tensors]
        self._ops = _Ops(self._module)
        self._has_gradient: list[bool] = []
        self._products: list[tuple[int, bool, str]] = []
        self._is_made: list[bool] = []

    def joint(self) -> Joint:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils._python_dispatch import _disable_current_modes

        def run(tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
            return self._run(tensors, grads)

        # (A step that meets a new size may run in anomaly mode, which reads values.)
        silent = torch.autograd.set_detect_anomaly(False)
        with _disable_current_modes(), FakeTensorMode(), _compiling(), silent:
            tensors, grads = (
                [self._empty(meta) for meta in metas] for metas in (self._tensors, self._outputs)
            )
            return self._read(make_fx(run, tracing_mode="fake")(tensors, grads))

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
        written = [
            x.copy_(_plain(after))
            for x, after in zip(tensors, functional, strict=True)
            if torch._functionalize_has_data_mutation(after.elem)  # type: ignore[attr-defined]
        ]
        return [*map(_plain, made), *written]

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
            outputs = self._ops.run(*leaves)
            self._has_gradient = [x.requires_grad for x in outputs]
            roots = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
            found = self._gradients(leaves, anchor, roots, pending)
        self._is_made = [grad is not None for grad in found]
        factors = [t for p in pending if _at(p.weight, leaves) is not None for t in (p.x, p.grad)]
        return [*outputs, *(grad for grad in found if grad is not None), *factors]

    def _gradients(
        self,
        leaves: list[Tensor],
        anchor: Tensor,
        roots: list[tuple[Tensor, Tensor]],
        pending: list[Pending],
    ) -> list[Tensor | None]:
        """Gradients of the leaves; of weights of products only those that other ops leave."""
        wanted = [at for at, needs in enumerate(self._needs) if needs]
        total: list[Tensor | None] = [None] * len(leaves)

        def add(roots: Sequence[tuple[Tensor, Tensor]]) -> None:
            if not roots:
                return
            _, *found = torch.autograd.grad(
                [x for x, _ in roots],
                [anchor, *(leaves[at] for at in wanted)],
                [grad for _, grad in roots],
                allow_unused=True,
                retain_graph=True,
            )
            for at, grad in zip(wanted, found, strict=True):
                if grad is not None:
                    before = total[at]
                    total[at] = grad if before is None else before + grad

        add(roots)
        # Autograd does not see weights and biases of products: what lies behind one (a transpose,
        # a cast) gets its gradient here, and a weight that is a parameter outside.
        hidden: list[tuple[Tensor, Tensor]] = []
        for each in pending:
            at = _at(each.weight, leaves)
            if at is None:
                fresh = weight_gradient(
                    None, each.x, each.grad, transposed=each.transposed, scaling=each.scaling
                )
                assert fresh is not None
                hidden.append((each.weight, fresh))
            else:
                self._products.append((at, each.transposed, each.scaling))
            if each.bias is not None and each.bias.requires_grad:
                hidden.append((each.bias, each.grad.sum(0)))
        add(hidden)
        return total

    def _read(self, module: fx.GraphModule) -> Joint:
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        tensors = placeholders[: len(self._tensors)]
        gradients = zip(placeholders[len(tensors) :], self._has_gradient, strict=True)
        (results,) = nodes[-1].args
        rest = iter(results)
        outputs = tuple(next(rest) for _ in self._outputs)
        made = tuple(next(rest) if is_made else None for is_made in self._is_made)
        products = tuple(Product(*how, next(rest), next(rest)) for how in self._products)
        return Joint(
            module=module,
            tensors=tuple(tensors),
            num_inputs=len(self._program.inputs),
            gradients=tuple(node for node, has in gradients if has),
            op_of=self._ops.of,
            outputs=outputs,
            has_gradient=tuple(self._has_gradient),
            made=made,
            products=products,
            writes=tuple(rest),
            needs=tuple(self._needs),
        )


class _Ops(fx.Interpreter):
    """Runs a program, noting which nodes of the joint graph each of its ops makes. Mutable."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.of: dict[fx.Node, str] = {}
        """The op of each node of the forward."""
        self._lines, self._op = module.meta["lines"], ""
        self._last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        graph = _graph()
        self._last = self._last or next(reversed(graph.nodes))
        result = super().run_node(n)
        # (An item of an op's results has no line of its own.)
        self._op = self._lines.get(n.name, (self._op, 0))[0]
        while self._last.next.op != "root":
            self._last = self._last.next
            self.of[self._last] = self._op
        return result


def _graph() -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    return graph


def _plain(x: Any) -> Tensor:
    torch._sync(x)
    plain: Tensor = torch._from_functional_tensor(x.elem)
    return plain


def _at(weight: Tensor, leaves: Sequence[Tensor]) -> int | None:
    return next((i for i, leaf in enumerate(leaves) if leaf is weight), None)


@contextmanager
def _compiling() -> Iterator[None]:
    """Let calls of ours take the form that a graph holds (`torch.compiler.is_compiling`)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
