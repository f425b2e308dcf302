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

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, Op, Program, Ref, TensorMeta, map_refs
from planner.language.graph.called_modules import called_whole
from planner.language.layout.axes import Degrees
from planner.language.layout.redistribute import EXCHANGE_ROWS, REDISTRIBUTE
from planner.language.ops.record import family_of


def check_experts(graph: ModelGraph, degrees: Degrees) -> None:
    """Raise LayoutError where a model's experts cannot lie on the experts' mesh of these sizes."""
    ep, etp = degrees["ep"], degrees["etp"]
    if ep * etp == 1:
        return
    if not any(grouped_products(program) for program in graph.classes):
        raise LayoutError(
            f"ep={ep} etp={etp} was given, and experts are recognised by products of runs of rows "
            f"(grouped_mm), of which the model has none{_not_recognised(graph)}; use ep=1 and "
            "etp=1, or multiply experts by torch.nn.functional.grouped_mm"
        )
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


def _not_recognised(graph: ModelGraph) -> str:
    """Return what of a model without grouped products may be experts; "" where nothing is."""
    found = dict.fromkeys(name for program in graph.classes for name in _stacked(program))
    met = f" (all rows meet all matrices of {', '.join(found)}, which tp divides)" if found else ""
    return called_whole(graph) or met


def _stacked(program: Program) -> Iterator[str]:
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


def expert_params(program: Program) -> frozenset[str]:
    """Return the parameters that hold a matrix for each expert."""
    makers = {name: op for op in program.ops for name in op.outputs}
    found = set()
    for op in grouped_products(program):
        name = op.inputs[1]
        while name in makers:  # a weight that is transposed, cast or brought to its place
            name = makers[name].inputs[0]
        found.add(name)
    return frozenset(found)


def spread_params(program: Program) -> frozenset[str]:
    """Return the parameters of a rank's program that lie on the experts' mesh."""
    is_spread = any(op.target == EXCHANGE_ROWS for op in program.ops)
    return expert_params(program) if is_spread else frozenset()


def spread_experts(program: Program, ep: int, *, fullest: float = 1.0) -> Program:
    """Return what the fullest of `ep` ranks runs for a bound program; without experts the program.

    Shapes, not values: the ends of runs are those of the rank's own experts. Raises LayoutError
    where experts do not divide.
    """
    products = grouped_products(program)
    if ep == 1 or not products:
        return program
    tensors = dict(program.tensor)
    for name in _matrices(program, expert_params(program)):
        meta = tensors[name]
        number, *rest = meta.shape_at(1)
        if number % ep:
            raise LayoutError(
                f"ep={ep} does not divide the {number} experts of {meta.fqn or meta.name}; use a "
                "divisor"
            )
        tensors[name] = replace(meta, shape=(number // ep, *rest))
    going, inside = _rows_of_experts(program, products)
    for name in inside:
        tensors[name] = _with_rows(tensors[name], fullest)
    ops: list[Op] = []
    for op in program.ops:
        # A value that crosses the border between own rows and experts' rows is exchanged once.
        is_inside = bool(inside.intersection(op.outputs))
        takes = {name: f"{name}_sent" if is_inside else f"{name}_back"
                 for name in op.inputs if name in (going if is_inside else inside)}  # fmt: skip
        for name, moved in takes.items():
            if moved not in tensors:
                rows = program.tensor[name]
                meta = _with_rows(rows, fullest) if is_inside else rows
                tensors[moved] = replace(meta, name=moved, kind="activation")
                sent = Op(
                    name=moved, target=EXCHANGE_ROWS, args=(Ref(name), "ep"), outputs=(moved,)
                )
                ops.append(sent)
        ops.append(_renamed(op, takes) if takes else op)
    return replace(program, ops=tuple(ops), tensors=tuple(tensors.values()))


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
