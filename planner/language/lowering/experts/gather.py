"""Tokens to all ranks of ep instead of rows to some: a second form of a block's exchanges.

    exchanged   sort_rows, exchange -> products -> exchange, unsort_rows      k rows a token, to one
                                                                              rank each
    gathered    gather_rows         -> products -> scatter_rows               a row a token, to each
                                                                              of n ranks

Where a token has k experts, n ranks get fewer bytes in the second form as long as n < k, and each
node's links carry a token once, however many of its ranks take it. Which of both is run is said by
a layout on ep, in the placements that its ops then have: a sort takes rows whole and makes each
rank's own, and what puts copies back makes terms of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from planner.errors import LayoutError
from planner.language.graph import Op, Program, Ref
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import OpSharding, Own, Partial, Replicate
from planner.language.layout.redistribute import GATHER_ROWS, SCATTER_ROWS
from planner.language.lowering.experts.spread import Spreading
from planner.language.lowering.experts.weights import takes_runs
from planner.language.ops.families.entries.routing import SORT_ROWS, STACK_OF_RUNS, UNSORT_ROWS

_WHOLE = Replicate()


def gathered_layout(program: Program, class_index: int) -> ClassLayout | None:
    """Return the layout on ep of a block whose experts' tokens are gathered; None where it has
    none. `program` is the block's, unlowered.
    """
    ops = [*_placed(program)]
    if not ops:
        return None
    inputs, params, outputs = (
        ("R",) * len(names) for names in (program.inputs, program.params, program.outputs)
    )
    return ClassLayout(
        class_index=class_index, axis="ep", inputs=inputs, params=params, outputs=outputs,
        ops=tuple((op.name, str(sharding)) for op, sharding in ops),
    )  # fmt: skip


def _placed(program: Program) -> Iterator[tuple[Op, OpSharding]]:
    for op in program.ops:
        if op.target == SORT_ROWS:
            yield op, OpSharding(inputs=(_WHOLE, _WHOLE), outputs=(Own(0), Own(0), Own()))
        if op.target == UNSORT_ROWS:
            weights = (_WHOLE,) * (len(op.inputs) - 2)
            yield op, OpSharding(inputs=(Own(0), Own(0), *weights), outputs=(Partial(),))


def is_gathered(layout: ClassLayout | None) -> bool:
    """Whether a layout on ep says that tokens are gathered; None: rows are exchanged."""
    placed = {} if layout is None else layout.op_shardings
    return any(sharding.outputs == (Partial(),) for sharding in placed.values())


class Gathering(Spreading):
    """Rewrites a program so. Mutable, as what it extends."""

    def run(self, taking: list[Op]) -> Program:
        """Return the program of a rank. Raises LayoutError where rows are used beside experts."""
        self._sorts = [op for op in self._program.ops if op.target == SORT_ROWS]
        self._tokens: dict[str, str] = {}
        for sort in self._sorts:
            if {*sort.outputs}.intersection(self._program.outputs):
                self._refuse(sort.outputs[0])
        found = super().run(taking)
        made = {name for op in found.ops for name in op.outputs}
        left = made | {*found.inputs, *found.params}
        return replace(found, tensors=tuple(meta for meta in found.tensors if meta.name in left))

    def _borders(self, taking: list[Op]) -> tuple[set[str], set[str]]:
        """Return the copies of tokens, and all that is made of them until they are summed."""
        going = {op.outputs[0] for op in self._sorts}
        after, before = set(going), set[str]()
        for op in self._program.ops:
            if op.target == UNSORT_ROWS:
                before.add(op.inputs[0])
            elif after.intersection(op.inputs):
                after.update(op.outputs)
        for op in reversed(self._program.ops):
            if before.intersection(op.outputs):
                before.update(op.inputs)
        return going, (after & before) - going

    def _add(self, op: Op, going: set[str], inside: set[str], weights: set[str]) -> None:
        if op.target == SORT_ROWS:
            self.ops.append(self._gather(op))
        elif op.target == UNSORT_ROWS and op.inputs[0] in inside:
            self.ops.append(self._scatter(op))
        else:
            takes_ends = takes_runs(op) or op.target == STACK_OF_RUNS
            made = {name for sort in self._sorts for name in sort.outputs[: 3 - takes_ends]}
            if not inside.intersection(op.outputs) and (inside | made).intersection(op.inputs):
                self._refuse(op.outputs[0])
            super()._add(op, going, inside, weights)

    def _gather(self, sort: Op) -> Op:
        rows, order, ends = (self._program.tensor[name] for name in sort.outputs)
        tokens = f"{ends.name}_tokens"
        self._tokens[order.name] = tokens
        made = (
            replace(self._with_fullest(rows), name=f"{rows.name}_sent"),
            replace(self._with_fullest(order), name=f"{order.name}_own"),
            replace(self._own_experts(ends), name=f"{ends.name}_own"),
            replace(ends, name=tokens, shape=(self._ep,), dtype="int64"),
        )
        self.tensors |= {meta.name: meta for meta in made}
        args = (*sort.args[:2], "ep", self._ep, *sort.args[2:])
        names = tuple(meta.name for meta in made)
        return Op(name=names[0], target=GATHER_ROWS, args=args, outputs=names, line=sort.line)

    def _scatter(self, op: Op) -> Op:
        rows, order, weights, copies = op.args
        assert isinstance(order, Ref)
        tokens = self._tokens[order.name]
        args = (rows, Ref(f"{order.name}_own"), weights, Ref(tokens), copies, "ep")
        # (Not the sum's name: what a plan says of that, to run it again, is not of this.)
        return replace(op, name=f"{op.name}_scattered", target=SCATTER_ROWS, args=args)

    def _own_ends(self, ends: str) -> str:
        if f"{ends}_own" not in self.tensors:
            self._refuse(ends)
        return f"{ends}_own"

    def _exchanged(self, name: str, *, back: bool) -> str:
        if back or f"{name}_sent" not in self.tensors:
            self._refuse(name)
        return f"{name}_sent"

    def _refuse(self, name: str) -> NoReturn:
        raise LayoutError(
            f"tokens of experts can't be gathered over ep: rows at {name} are not sorted for them, "
            "or are used beside them; exchange rows instead, with no layout on ep"
        )
