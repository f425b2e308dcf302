"""What a module returned, found in the graph: what its ops make and others use."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from planner.errors import PlanError
from planner.language.graph import Block, ModelGraph, Op, Program
from planner.language.graph.module_keys import OPAQUE_MODULE


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an op of a block makes."""

    block: int
    tensor: str


def returned(graph: ModelGraph, name: str, modules: Mapping[str, type[nn.Module]]) -> Made:
    """Return the one tensor that a module returned, the last time that it ran.

    `modules` are those of the model by name. Of what a module returns, that counts which others
    use on the way to the loss. Raises PlanError, with what can be had, where that is none, or
    several.
    """
    kind = modules.get(name)
    ops = list(_ops(graph))
    inside = [_is_in(module, name) for *_, module in ops]
    if kind is not None and kind.forward is nn.Module.forward:
        parts = [n for n in modules if n.rpartition(".")[0] == name]
        such = f", such as {parts[-1]}" if parts else ""
        raise PlanError(
            f"{name} is a {kind.__name__}, which is not called and returns nothing; fetch one of "
            f"its parts{such}"
        )
    if not any(inside):
        raise PlanError(_why_nothing(graph, name, ops, modules))
    last = len(inside) - 1 - inside[::-1].index(True)
    first = last
    while first and inside[first - 1]:
        first -= 1
    run, uses = range(first, last + 1), _Uses(graph, ops)
    found = [
        Made(block.index, out)
        for block, program, op, _ in ops[first : last + 1]
        for out in op.outputs
        if uses.leaves(block, program, out, run)
    ]
    if len(found) == 1:
        return found[0]
    what = "" if kind is None else f" (a {kind.__name__})"
    if not found:
        raise PlanError(
            f"nothing that {name}{what} makes is used outside of it; fetch a module around it, or "
            "values by BLOCK/TENSOR as intermediate_names lists them"
        )
    names = ", ".join(f"{graph.blocks[made.block].name}/{made.tensor}" for made in found[:6])
    raise PlanError(
        f"{name}{what} makes {len(found)} tensors that others use, as one that returns a tuple or "
        f"a dict does; fetch which of them you mean: {names}"
    )


_Placed = tuple[Block, Program, Op, str]
"""An op with its block, the block's program, and the module that called it."""


def _ops(graph: ModelGraph) -> Iterator[_Placed]:
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for op in program.ops:
            yield block, program, op, module_of(op, program, block)


def module_of(op: Op, program: Program, block: Block) -> str:
    """Return the name of the module that called an op: a block whose ops are all of its own module
    has them relative to it.
    """
    if op.beside:
        return ""
    if any(f"{each.module}.".startswith(f"{block.name}.") for each in program.ops):
        return op.module
    return f"{block.name}.{op.module}".strip(".")


def _is_in(module: str, name: str) -> bool:
    return f"{module}.".startswith(f"{name}.")


class _Uses:
    """Where the tensors of a graph are used, by numbers of ops."""

    def __init__(self, graph: ModelGraph, ops: list[_Placed]) -> None:
        self._loss = graph.loss
        self._by_block: dict[Made, list[int]] = {}
        self._taken: dict[str, list[Made]] = {}
        for at, (block, _, op, _) in enumerate(ops):
            for name in op.inputs:
                self._by_block.setdefault(Made(block.index, name), []).append(at)
        for block in graph.blocks:
            own = graph.classes[block.class_index].inputs
            for name, of_model in zip(own, block.inputs, strict=True):
                self._taken.setdefault(of_model, []).append(Made(block.index, name))

    def leaves(self, block: Block, program: Program, out: str, run: range) -> bool:
        """Whether what an op of a run makes is used by an op outside of it, or is the loss."""
        outputs = zip(program.outputs, block.outputs, strict=True)
        of_model = [theirs for own, theirs in outputs if own == out]
        places = [Made(block.index, out), *(m for n in of_model for m in self._taken.get(n, ()))]
        used = any(at not in run for place in places for at in self._by_block.get(place, ()))
        return used or self._loss in of_model


def _why_nothing(
    graph: ModelGraph, name: str, ops: list[_Placed], modules: Mapping[str, type[nn.Module]]
) -> str:
    for _, _, op, module in ops:
        if op.target == OPAQUE_MODULE and _is_in(name, module):
            return (
                f"{name} is inside {module}, which depends on values and runs as it is; fetch "
                f"{module}"
            )
    if name in modules:
        return (
            f"{name} (a {modules[name].__name__}) makes nothing on the way to the loss: it hands "
            "its input on, or is not used; fetch the module before it"
        )
    listed = [
        f"{block.name}/{out}" if block.name else out
        for block, _, op, _ in ops
        for out in op.outputs
    ]
    near = difflib.get_close_matches(name, [*listed, *filter(None, modules)], n=1, cutoff=0.0)
    return (
        f"no op or module makes {name!r}; names are those of modules, and BLOCK/TENSOR as "
        f"intermediate_names lists them, for example {near[0]}"
    )
