"""The experts of a block on the ranks of ep: each rank has some of them, and gets their rows.

A block's rows are multiplied in groups, one an expert (`aten._grouped_mm`: rows in the order of
their experts, the experts' matrices, where each group ends). On ep a rank multiplies with the
experts it has, so rows go to the ranks of their experts before the first product, and come back
after the last (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2):

    rows (own)  -- exchange -->  rows of own experts  products ...  -- exchange -->  rows (own)

r rows leave each rank. As many arrive where all experts are picked as often; on the rank whose
experts are picked most, `fullest` times as many. All wait for that one, so it is what is lowered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, gcd

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, Op, Program, Ref, TensorMeta, map_refs
from planner.language.graph.called_modules import called_whole
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.layout.redistribute import DEAL_RUNS, EXCHANGE_ROWS, REDISTRIBUTE
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS
from planner.language.ops.record import family_of


def check_experts(graph: ModelGraph, degrees: Degrees) -> None:
    """Raise LayoutError where a model's experts cannot lie on the experts' mesh of these sizes."""
    if degrees.expert_parts > 1:
        check_experts_parts(graph, degrees["ep"], degrees["etp"])
        check_experts_mesh(degrees)


def check_experts_parts(graph: ModelGraph, ep: int, etp: int = 1) -> None:
    """Raise LayoutError where a model has no experts that `ep` divides."""
    if ep * etp == 1:
        return
    if not any(grouped_products(program) for program in graph.classes):
        raise LayoutError(
            f"ep={ep} etp={etp} was given, and experts are recognised by products of runs of rows "
            f"(grouped_mm), of which the model has none{_not_recognised(graph)}; use ep=1 and "
            "etp=1, or multiply experts by torch.nn.functional.grouped_mm"
        )
    for program in graph.classes:
        _check_by_expert(program, f"ep={ep} etp={etp}")
    if experts_of(graph) % ep:
        raise LayoutError(
            f"ep={ep} does not divide the experts of each block, {experts_of(graph)}; use a divisor"
        )


def check_experts_mesh(degrees: Degrees) -> None:
    """Raise LayoutError where the ranks of a stage have no experts' mesh of these sizes."""
    ep, etp = degrees["ep"], degrees["etp"]
    if etp not in (1, degrees["tp"]):
        raise LayoutError(f"etp={etp} was given and tp={degrees['tp']}; use etp=1 or etp=tp")
    if degrees.num_ranks % degrees.expert_parts:
        raise LayoutError(
            f"ep={ep} * etp={etp} does not divide the {degrees.num_ranks} ranks of a stage "
            f"({degrees}); use a divisor"
        )


def grouped_products(program: Program) -> list[Op]:
    """Return the products of runs of rows of a program."""
    return [op for op in program.ops if family_of(op.target).deals_rows]


def _takes_runs(op: Op) -> bool:
    """Whether an op takes rows, a matrix or a bias for each run of them, and where runs end."""
    return family_of(op.target).deals_rows or op.target == BIAS_OF_RUNS


def _not_recognised(graph: ModelGraph) -> str:
    """Return what of a model without grouped products may be experts; "" where nothing is."""
    found = dict.fromkeys(name for program in graph.classes for name in stacked_matrices(program))
    met = f" (all rows meet all matrices of {', '.join(found)}, which tp divides)" if found else ""
    return called_whole(graph) or met


def stacked_matrices(program: Program) -> Iterator[str]:
    """Yield the names of parameters of several matrices that a product takes."""
    source = {name: name for name in program.params}
    for op in program.ops:
        family = family_of(op.target)
        if family.across.algebra == "rearrangement" and source.keys() >= {*op.inputs}:
            source |= {made: source[name] for made in op.outputs for name in op.inputs}
        for name in op.inputs if family.arithmetic == "matmul" else ():
            meta = program.tensor[source.get(name, name)]
            if name in source and len(meta.shape) > 2:
                yield meta.fqn or meta.name


def _of_one_expert(program: Program) -> str | None:
    """Return the name of a weight of one expert alone; None where parameters have a dim of them."""
    makers = {name: op for op in program.ops for name in op.outputs}
    for op in filter(_takes_runs, program.ops):
        name = op.inputs[1]
        if _by_expert(program, makers, name) is None:
            while name in makers:
                name = makers[name].inputs[-1]
            return program.tensor[name].fqn or name
    return None


def _check_by_expert(program: Program, given: str) -> None:
    if (own := _of_one_expert(program)) is not None:
        raise LayoutError(
            f"{given} was given, and each expert's weights, like {own}, are a parameter of their "
            "own or a part of one that has no dim of experts, which ep does not place; use ep=1 "
            "and etp=1, or hold them in one parameter [experts, ...]"
        )


def experts_of(graph: ModelGraph) -> int:
    """Return the largest number that divides the experts of each block that has some; 1 without,
    and where an expert's weights are parameters of their own.
    """
    if any(_of_one_expert(program) is not None for program in graph.classes):
        return 1
    numbers = [
        program.tensor[name].shape_at(1)[0]
        for program in graph.classes
        for name in expert_params(program)
    ]
    return gcd(*numbers) or 1


def expert_params(program: Program) -> frozenset[str]:
    """Return the parameters that hold a matrix, or a bias, for each expert."""
    makers = {name: op for op in program.ops for name in op.outputs}
    takes = (op.inputs[1] for op in program.ops if _takes_runs(op))
    found = (_by_expert(program, makers, name) for name in takes)
    return frozenset(name for name in found if name is not None)


def experts_params(graph: ModelGraph) -> frozenset[str]:
    """Return the same of all blocks of a model, by names in the graph."""
    found = set()
    of_class = [expert_params(program) for program in graph.classes]
    for block in graph.blocks:
        inner = graph.classes[block.class_index].params
        named = dict(zip(inner, block.params, strict=True))
        found |= {named[name] for name in of_class[block.class_index] if name in named}
    return frozenset(found)


def _by_expert(program: Program, makers: Mapping[str, Op], name: str) -> str | None:
    """Return the parameter whose experts' weights are taken, transposed, cast or brought to their
    place; None where they are put together, or cut from a parameter without a dim of experts.
    """
    experts = program.tensor[name].shape[0]
    while name in makers:
        maker = makers[name]
        if len({*maker.inputs}) != 1 or program.tensor[maker.inputs[0]].shape[:1] != (experts,):
            return None
        name = maker.inputs[0]
    return name


def on_experts_mesh(
    program: Program, params: tuple[Placements, ...], *, etp: int
) -> tuple[Placements, ...]:
    """Return the placements of a block's parameters where ep is above 1: those of experts lie on
    the experts' mesh, cut there by tp's layout where `etp` is above 1.
    """
    experts = expert_params(program)
    return tuple(
        Placements.of({"ep": Shard(0)} | ({"etp": placed["tp"]} if etp > 1 else {}))
        if name in experts
        else placed
        for name, placed in zip(program.params, params, strict=True)
    )


def cuts_rows(program: Program, layout: ClassLayout | None) -> bool:
    """Whether each rank of a layout's axis has experts' rows of its own; `program` is the block's,
    unlowered.
    """
    placed = {} if layout is None else layout.op_shardings
    shardings = [placed.get(op.name) for op in grouped_products(program)]
    taken = [sharding.inputs[0] for sharding in shardings if sharding is not None]
    return len(taken) == len(shardings) and all(
        isinstance(rows, Shard) and rows.dim == 0 for rows in taken
    )


def check_rows(program: Program, layouts: Mapping[str, ClassLayout], degrees: Degrees) -> None:
    """Raise LayoutError where ranks of one experts' group would send the same rows twice.

    `program` is a block's, unlowered, and `layouts` are its own by axis. On an axis whose ranks are
    in one group of ep each has rows of its own. On tp with etp ranks send the same rows, each to
    the ranks with its part of the matrices.
    """
    if degrees["ep"] == 1 or not grouped_products(program):
        return
    for axis in lowered_axes():
        size, etp = degrees[axis.name], degrees["etp"]
        if size == 1:
            continue
        own = cuts_rows(program, layouts.get(axis.name))
        given = f"ep={degrees['ep']} etp={etp} with {axis.name}={size}"
        if axis.whole_params and not own:
            raise LayoutError(
                f"{given}: all ranks of {axis.name} would send the same rows; use {axis.name}=1"
            )
        if not axis.whole_params and own != (etp == 1):
            are = "each have rows of their own" if own else "have the same rows of experts"
            raise LayoutError(f"{given}: ranks of {axis.name} {are}; use etp={1 if own else size}")


def spread_params(program: Program) -> frozenset[str]:
    """Return the parameters of a rank's program that lie on the experts' mesh."""
    is_spread = any(op.target == EXCHANGE_ROWS for op in program.ops)
    return expert_params(program) if is_spread else frozenset()


def spread_experts(program: Program, ep: int, *, etp: int = 1, fullest: float = 1.0) -> Program:
    """Return what a rank of `ep` runs for a bound program; without experts the program.

    Its rows, inside, are as many as the rank has that gets `fullest` times the mean: how many a
    step brings is known by the step alone. Raises LayoutError where experts do not divide, or rows
    meet others inside that are not exchanged with them.
    """
    taking = [op for op in program.ops if _takes_runs(op)]
    if ep == 1 or not taking:
        return program
    _check_by_expert(program, f"ep={ep} etp={etp}")
    return _Spreading(program, ep, etp, fullest).run(taking)


class _Spreading:
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
        program = self._program
        matrices = set(_matrices(program, expert_params(program)))
        for name in matrices:
            self.tensors[name] = self._own_experts(self.tensors[name])
        going, inside = _rows_of_experts(program, taking)
        for name in inside:
            self.tensors[name] = _with_rows(self.tensors[name], self._fullest)
        self._follow_runs(going | inside)
        for op in program.ops:
            if self._etp == 1 and op.target == REDISTRIBUTE and matrices.issuperset(op.inputs):
                # The gradient of a rank's own experts is of all rows that came to them: over tp,
                # whose ranks have rows of their own, there is nothing left to sum.
                *args, _ = op.args
                op = replace(op, args=(*args, False))
            self._add(op, going, inside, matrices)
        return replace(program, ops=tuple(self.ops), tensors=tuple(self.tensors.values()))

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
            ends = self._root(op.inputs[2]) if _takes_runs(op) else next(iter(of), "")
            for name in (op.inputs[0], *op.outputs) if _takes_runs(op) else op.outputs:
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

    def _add(self, op: Op, going: set[str], inside: set[str], matrices: set[str]) -> None:
        # A value that crosses the border between own rows and experts' rows is exchanged once.
        is_inside = bool(inside.intersection(op.outputs))
        moved = {
            name: self._exchanged(name, back=not is_inside)
            for name in op.inputs
            if name in (going if is_inside else inside)
        }
        if _takes_runs(op):
            moved[op.inputs[2]] = self._dealt(self._root(op.inputs[2]))[1]
        elif is_inside:
            self._check_alone(op, going | inside | matrices)
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
            meta = rows if back else _with_rows(rows, self._fullest)
            self.tensors[moved] = replace(meta, name=moved, kind="activation")
            args = (Ref(name), Ref(dealt), "ep", back)
            self.ops.append(Op(name=moved, target=EXCHANGE_ROWS, args=args, outputs=(moved,)))
        return moved


def _matrices(program: Program, params: frozenset[str]) -> Iterator[str]:
    """Experts' parameters, and what is made of them alone."""
    found = set(params)
    yield from params
    for op in program.ops:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
            yield from op.outputs


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


def _with_rows(meta: TensorMeta, factor: float) -> TensorMeta:
    rows, *rest = meta.shape_at(1)
    return replace(meta, shape=(ceil(factor * rows), *rest))


def _renamed(op: Op, names: dict[str, str]) -> Op:
    def rename(ref: Ref) -> Ref:
        return Ref(names.get(ref.name, ref.name))

    return replace(op, args=map_refs(op.args, rename), kwargs=map_refs(op.kwargs, rename))
