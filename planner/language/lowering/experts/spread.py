"""The program of a rank of ep: rows go to the ranks of their experts, and come back.

A block's rows are multiplied in groups, one an expert (`aten._grouped_mm`: rows in the order of
their experts, the experts' matrices, where each group ends). On ep a rank multiplies with the
experts it has, so rows go to the ranks of their experts before the first product, and come back
after the last (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2):

    rows (own)  -- exchange -->  rows of own experts  products ...  -- exchange -->  rows (own)

r rows leave each rank. As many arrive where all experts are picked as often; on the rank whose
experts are picked most, `fullest` times as many. All wait for that one, so it is what is lowered.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from planner.errors import LayoutError
from planner.language.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.language.layout.redistribute import DEAL_RUNS, EXCHANGE_ROWS, REDISTRIBUTE
from planner.language.lowering.experts.weights import (
    matrices,
    others_weights,
    stacked,
    takes_runs,
)
from planner.language.ops.families.entries.routing import STACK_OF_RUNS


class Spreading:
    """Rewrites a program op by op. Mutable: ops and tensors are added.

    Attributes:
        tensors: of the rewritten program, by name.
        ops: of the rewritten program, in order.
        runs: by rows that experts take or make, the tensor that says where their runs end.
    """

    def __init__(self, program: Program, ep: int, etp: int, fullest: float) -> None:
        self._program, self._ep, self._etp, self._fullest = program, ep, etp, fullest
        self._maker = {name: op for op in program.ops for name in op.outputs}
        self.tensors = dict(program.tensor)
        self.ops: list[Op] = []
        self.runs: dict[str, str] = {}

    def run(self, taking: list[Op]) -> Program:
        """Return the program of a rank; `taking` are its ops on runs."""
        program = self._program
        others = others_weights(program, self._ep)
        weights = {name: has_all for name, has_all in matrices(program) if name not in others}
        for name, has_all in weights.items():
            if has_all:
                self.tensors[name] = self._own_experts(self.tensors[name])
        going, inside = self._borders(taking)
        for name in inside:
            self.tensors[name] = self._with_fullest(self.tensors[name])
        self._follow_runs(going | inside)
        for op in program.ops:
            if others.issuperset(op.outputs):
                continue
            if self._etp == 1 and op.target == REDISTRIBUTE and weights.keys() >= {*op.inputs}:
                # The gradient of a rank's own experts is of all rows that came to them: over tp,
                # whose ranks have rows of their own, there is nothing left to sum.
                *args, _ = op.args
                op = replace(op, args=(*args, False))
            self._add(self._of_own(op, others), going, inside, {*weights})
        return replace(
            program,
            params=tuple(name for name in program.params if name not in others),
            ops=tuple(self.ops),
            tensors=tuple(meta for name, meta in self.tensors.items() if name not in others),
        )

    def _borders(self, taking: list[Op]) -> tuple[set[str], set[str]]:
        """Return the rows that go to experts, and those that are with them."""
        return _rows_of_experts(self._program, taking)

    def _of_own(self, op: Op, others: set[str]) -> Op:
        """Return what puts weights together without those of others' experts."""
        if others.isdisjoint(stacked(op)):
            return op
        own = tuple(Ref(name) for name in stacked(op) if name not in others)
        if op.target != STACK_OF_RUNS:
            return replace(op, args=(own, *op.args[1:]))
        return replace(op, args=(Ref(self._own_ends(self._root(op.inputs[0]))), own))

    def _own_experts(self, meta: TensorMeta) -> TensorMeta:
        number, *rest = meta.shape_at(1)
        if number % self._ep:
            raise LayoutError(
                f"ep={self._ep} does not divide the {number} experts of {meta.fqn or meta.name}; "
                "use a divisor"
            )
        return replace(meta, shape=(number // self._ep, *rest))

    def _follow_runs(self, rows: set[str]) -> None:
        """Find where the runs of each of these rows end: as products take them, and hand on."""
        for op in self._program.ops:
            of = [self.runs[name] for name in op.inputs if name in self.runs]
            ends = self._root(op.inputs[2]) if takes_runs(op) else next(iter(of), "")
            for name in (op.inputs[0], *op.outputs) if takes_runs(op) else op.outputs:
                if name in rows and ends:
                    self.runs.setdefault(name, ends)
        for op in reversed(self._program.ops):  # what leads to a product
            of = [self.runs[name] for name in op.outputs if name in self.runs]
            for name in rows.intersection(op.inputs) if of else ():
                self.runs.setdefault(name, of[0])

    def _root(self, name: str) -> str:
        while (maker := self._maker.get(name)) is not None and maker.target == REDISTRIBUTE:
            name = maker.inputs[0]
        return name

    def _add(self, op: Op, going: set[str], inside: set[str], weights: set[str]) -> None:
        # A value that crosses the border between own rows and experts' rows is exchanged once.
        is_inside = bool(inside.intersection(op.outputs))
        moved = {
            name: self._exchanged(name, back=not is_inside)
            for name in op.inputs
            if name in (going if is_inside else inside)
        }
        if takes_runs(op):
            moved[op.inputs[2]] = self._own_ends(self._root(op.inputs[2]))
        elif is_inside:
            self._check_alone(op, going | inside | weights)
        self.ops.append(_renamed(op, moved) if moved else op)

    def _check_alone(self, op: Op, inside: set[str]) -> None:
        """Raise LayoutError where rows meet rows that stay where they are."""
        rows = self._program.tensor[next(n for n in op.outputs if n in inside)].shape_at(1)[0]
        for name in op.inputs:
            meta = self._program.tensor[name]
            shape = meta.shape_at(1)
            if name not in inside and len(shape) > 1 and shape[0] == rows:
                raise LayoutError(
                    f"op {op.name} of the experts adds rows that are not sent with theirs; write "
                    "biases as the libraries do, or use ep=1"
                )

    def _with_fullest(self, meta: TensorMeta) -> TensorMeta:
        rows, *rest = meta.shape_at(1)
        return replace(meta, shape=(ceil(self._fullest * rows), *rest), kind="activation")

    def _own_ends(self, ends: str) -> str:
        """Return the name of where runs of own experts end."""
        return self._dealt(ends)[1]

    def _dealt(self, ends: str) -> tuple[str, str]:
        """Return the names of the numbers of rows that ranks send each other, and of where runs of
        own experts end; they are made where they are first needed.
        """
        dealt, own = f"{ends}_dealt", f"{ends}_own"
        if dealt not in self.tensors:
            meta = self._program.tensor[ends]
            each = self._own_experts(meta).shape_at(1)[0]
            for name, shape, dtype in (
                (dealt, (2, self._ep, each), "int64"),
                (own, (each,), meta.dtype),
            ):
                made = replace(meta, name=name, shape=shape, dtype=dtype, kind="activation", fqn="")
                self.tensors[name] = made
            args = (Ref(ends), "ep", self._ep)
            self.ops.append(Op(name=dealt, target=DEAL_RUNS, args=args, outputs=(dealt, own)))
        return dealt, own

    def _exchanged(self, name: str, *, back: bool) -> str:
        moved = f"{name}_back" if back else f"{name}_sent"
        if moved not in self.tensors:
            dealt, _ = self._dealt(self.runs[name])
            rows = self._program.tensor[name]
            meta = rows if back else self._with_fullest(rows)
            self.tensors[moved] = replace(meta, name=moved, kind="activation")
            args = (Ref(name), Ref(dealt), "ep", back)
            self.ops.append(Op(name=moved, target=EXCHANGE_ROWS, args=args, outputs=(moved,)))
        return moved


def _rows_of_experts(program: Program, products: list[Op]) -> tuple[set[str], set[str]]:
    """Return the rows that experts take, and what is made of them until they are done with: results
    of products, what products hand on to each other, and rows that tp ranks bring together and
    share out around them.
    """
    makers = {name: op for op in program.ops for name in op.outputs}
    made = {name for op in products for name in op.outputs}
    # Inside is what lies between two products: behind a product and ahead of another.
    after = set(made)
    for op in program.ops:
        if after.intersection(op.inputs):
            after.update(op.outputs)
    before = {op.inputs[0] for op in products}
    for op in reversed(program.ops):
        if before.intersection(op.outputs) and op not in products:
            before.update(op.inputs)
    inside = made | (after & before)
    going = set()
    for op in products:
        name = op.inputs[0]
        # Rows that tp redistributes for the product: they are exchanged before that.
        while name in makers and makers[name].target == REDISTRIBUTE:
            inside.add(name)
            name = makers[name].inputs[0]
        going.add(name)
    for op in program.ops:
        if op.target == REDISTRIBUTE and after.intersection(op.inputs) & inside:
            inside.update(op.outputs)
    return going - inside, inside


def _renamed(op: Op, names: dict[str, str]) -> Op:
    def rename(ref: Ref) -> Ref:
        return Ref(names.get(ref.name, ref.name))

    return replace(op, args=map_refs(op.args, rename), kwargs=map_refs(op.kwargs, rename))
