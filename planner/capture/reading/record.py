"""The record of one export: tensors, ops and their user lines, as they are read."""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.blocks import RawOp
from planner.capture.diagnose import node_line, source_line
from planner.errors import CaptureError
from planner.language.graph import Op, TensorMeta, iter_refs

_WITHOUT_GRADIENT = frozenset(
    (
        *("detach", "argmax", "argmin", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "rand_like", "randn_like"),
        *("randint_like", "histc", "bincount", "multinomial", "nextafter"),
    )
)
"""Ops whose floating results have no gradient, whatever they are given."""

READ_DETACHED = frozenset(("randint_like", "bernoulli_", "normal_"))
"""Of these ops those that fail in a backward where what they read has a gradient, as Python's call
does not: it makes the first outside of autograd, and a write's pure form lacks the derivative of
the write, which is zero."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One export as our ops with plain integers; `lines` is the user's line of each op."""

    tensors: dict[str, TensorMeta]
    inputs: tuple[str, ...]
    ops: tuple[RawOp, ...]
    loss: str
    lines: tuple[str, ...]


class Recorder:
    """Grows while an export is read; mutable for that reason.

    `maker` is the op behind each activation; `stale` the views of tensors that were written
    in place after the view was taken, which nothing may read any more.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorMeta] = {}
        self.ops: list[RawOp] = []
        self.lines: list[str] = []
        self.maker: dict[str, Op] = {}
        self.stale: set[str] = set()
        self._names: set[str] = set()

    def tensor(self, name: str, value: Any, **fields: Any) -> None:
        """Note a tensor shaped like `value`."""
        self._names.add(name)
        self.tensors[name] = TensorMeta(
            name=name,
            shape=tuple(int(s) for s in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            **fields,
        )

    def fresh(self, name: str) -> str:
        """Return an unused name like this one."""
        candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        fresh = next(c for c in candidates if c not in self._names)
        self._names.add(fresh)
        return fresh

    def emit(
        self,
        node: torch.fx.Node,
        target: str,
        name: str,
        args: Any,
        kwargs: Any,
        outputs: tuple[str, ...],
        *,
        at: int | None = None,
    ) -> Op:
        """Note an op made for `node`, last or at a position, and return it.

        Raises CaptureError if it reads a stale view.
        """
        stack = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        path = stack[-1].removeprefix("user").removeprefix(".") if stack else ""
        op = Op(
            name=name.replace(".", "_"),
            target=target,
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            line=source_line(node),
        )
        used_stale = self.stale.intersection(op.inputs)
        if used_stale:
            raise CaptureError(
                f"the model reads a view{node_line(node)} or what it is a view of after either was "
                "written in place; take the view again after the write, or write the out-of-place "
                "form"
            )
        position = len(self.ops) if at is None else at
        self.ops.insert(position, RawOp(op=op, module=path.split("@")[0]))
        self.maker.update(dict.fromkeys(outputs, op))
        self.lines.insert(position, node_line(node))
        return op

    def needs_grad(self, packet: str, args: Any, kwargs: Any) -> bool:
        """Whether an op's outputs need a gradient."""
        if packet in _WITHOUT_GRADIENT:
            return False
        refs = iter_refs((args, tuple(v for _, v in kwargs)))
        return any(self.tensors[ref.name].requires_grad for ref in refs)

    def views_of(self, name: str) -> set[str]:
        """Names of the views taken so far of a tensor, views of views included."""
        # Ops are in order, so a view of a view comes behind it and a single pass finds both.
        found = {name}
        for raw in self.ops:
            if is_view(raw.op.target) and found.intersection(raw.op.inputs):
                found.update(raw.op.outputs)
        return found - {name}


@functools.cache
def is_view(target: str) -> bool:
    """Whether an op returns a view of an input."""
    schema = operator.attrgetter(target)(torch.ops)._schema
    return any(r.alias_info is not None for r in schema.returns)


def is_composite(target: torch._ops.OpOverload) -> bool:
    """Whether PyTorch makes an op of other ops, whatever the device."""
    kernel = "CompositeImplicitAutograd"
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), kernel)
    return found
