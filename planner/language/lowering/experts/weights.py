"""Which parameters of a block are weights of its experts, and which of them a rank of ep has.

Products of runs take the weights of all experts in one tensor [experts, ...]. It is one parameter,
of which each rank of ep has some rows; or it is put together (a *stack*) of parameters of the
experts' own modules, of which each rank has those of its own experts:

    rank 0 of 2     stack_of_runs(ends, (experts.0.w, experts.1.w))
    rank 1 of 2     stack_of_runs(ends, (experts.2.w, experts.3.w))

All ranks run one program, which has the names of the first rank's parameters (`own_params`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import LayoutError
from planner.language.graph import Block, ModelGraph, Op, Program, Ref, map_refs
from planner.language.layout.placement import Held, Shard
from planner.language.layout.placements import Placements
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, STACK_OF_RUNS
from planner.language.ops.record import family_of, packet_of
from planner.language.ops.registry import terms_of

_CUT_OTHERWISE = "are a part of a parameter that has no dim of experts"
_SHARED = "are used by several experts, or beside them"
_UNLIKE = "are not all taken alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What an op takes of all experts.

    Attributes:
        experts: how many there are.
        params: a parameter [experts, ...], or of each expert one of its own, in their order.
        stack: the op that puts these together; "" for one parameter.
        why_not: why ranks of ep cannot have their own of them; empty if they can.
    """

    experts: int
    params: tuple[str, ...]
    stack: str = ""
    why_not: str = ""

    @property
    def are_modules(self) -> bool:
        """Whether each expert has a parameter of its own."""
        return len(self.params) > 1

    def of_rank(self, ep: int, number: int) -> tuple[str, ...]:
        """Return the parameters that a rank of `ep` has something of."""
        if not self.are_modules:
            return self.params
        each = self.experts // ep
        return self.params[number * each : (number + 1) * each]


def grouped_products(program: Program) -> list[Op]:
    """Return the products of runs of rows of a program."""
    return [op for op in program.ops if family_of(op.target).deals_rows]


def takes_runs(op: Op) -> bool:
    """Whether an op takes rows, a matrix or a bias for each run of them, and where runs end."""
    return family_of(op.target).deals_rows or op.target == BIAS_OF_RUNS


def stacked(op: Op) -> tuple[str, ...]:
    """Return what an op puts together as rows of one tensor; nothing for other ops."""
    is_plain = packet_of(op.target) == "stack" and op.args[1:] in ((), (0,)) and not op.kwargs
    if op.target != STACK_OF_RUNS and not is_plain:
        return ()
    parts = op.args[1 if op.target == STACK_OF_RUNS else 0]
    assert isinstance(parts, tuple)
    return tuple(part.name for part in parts if isinstance(part, Ref))


def weights_of_experts(program: Program) -> tuple[Weights, ...]:
    """Return what each op on runs of rows takes of a program's experts."""
    taking = [op for op in program.ops if takes_runs(op)]
    if not taking:
        return ()
    makers = {name: op for op in program.ops for name in op.outputs}
    found = [_weights(program, makers, op.inputs[1]) for op in taking]
    alone = _used_alone(program, found)
    return tuple(
        replace(each, why_not=_SHARED)
        if each.are_modules and not each.why_not and not alone.issuperset(each.params)
        else each
        for each in found
    )


def _weights(program: Program, makers: Mapping[str, Op], name: str) -> Weights:
    """Follow weights back to parameters, through what transposes, casts or moves each expert's."""
    experts = program.tensor[name].shape[0]
    assert isinstance(experts, int)
    while name in makers:
        maker = makers[name]
        if len(parts := stacked(maker)) == experts:
            return _modules(program, makers, maker.name, parts)
        if len({*maker.inputs}) != 1 or program.tensor[maker.inputs[0]].shape[:1] != (experts,):
            return Weights(experts=experts, params=(_first(makers, name),), why_not=_CUT_OTHERWISE)
        name = maker.inputs[0]
    return Weights(experts=experts, params=(name,))


def _first(makers: Mapping[str, Op], name: str) -> str:
    while name in makers and makers[name].inputs:
        name = makers[name].inputs[-1]
    return name


def _modules(
    program: Program, makers: Mapping[str, Op], stack: str, parts: tuple[str, ...]
) -> Weights:
    """Follow each part of a stack back: all to parameters, by the same ops, and each to another."""
    ways = [_way_back(makers, part) for part in parts]
    params = tuple(name for name, _ in ways)
    metas = [program.tensor[name] for name in params]
    like = {
        (steps, meta.kind, meta.shape, meta.dtype, meta.requires_grad)
        for (_, steps), meta in zip(ways, metas, strict=True)
    }
    why_not = _SHARED if len({*params}) < len(params) else ""
    if len(like) > 1 or metas[0].kind != "param":
        why_not = _UNLIKE
    return Weights(experts=len(parts), params=params, stack=stack, why_not=why_not)


def _way_back(makers: Mapping[str, Op], name: str) -> tuple[str, tuple[Any, ...]]:
    """Return where a tensor comes from by ops of one tensor, and these ops, whatever the names."""
    steps = []
    while name in makers and len({*makers[name].inputs}) == 1:
        maker = makers[name]
        args, kwargs = (map_refs(value, lambda _: None) for value in (maker.args, maker.kwargs))
        steps.append((maker.target, args, kwargs))
        name = maker.inputs[0]
    return name, tuple(steps)


def _used_alone(program: Program, found: list[Weights]) -> frozenset[str]:
    """Return the parameters of modules that nothing uses but stacks of the same experts' own."""
    taken: dict[str, set[tuple[str, ...]]] = {}
    for each in found:
        for name in each.params if each.are_modules else ():
            taken.setdefault(name, set()).add(each.params)
    stacks = {each.stack for each in found}
    # What is made of one of them alone, on its way to a stack.
    of, beside = {name: name for name in taken}, set[str]()
    for op in program.ops:
        met = {of[name] for name in op.inputs if name in of}
        if len({*op.inputs}) == 1 and met:
            of |= dict.fromkeys(op.outputs, *met)
        elif op.name not in stacks:
            beside |= met
    beside |= {of[name] for name in program.outputs if name in of}
    return frozenset(name for name, lists in taken.items() if len(lists) == 1) - beside


def expert_params(program: Program) -> frozenset[str]:
    """Return the parameters that have weights of experts: of all of them, or of one."""
    return frozenset(matrix_dims(program))


def matrix_dims(program: Program) -> dict[str, tuple[int, int]]:
    """Return the dims of an expert's matrix in each of these parameters, behind that of experts."""
    return {
        name: (0, 1) if each.are_modules else (1, 2)
        for each in weights_of_experts(program)
        if not each.why_not
        for name in each.params
    }


def experts_params(graph: ModelGraph) -> frozenset[str]:
    """Return the same of all blocks of a model, by names in the graph."""
    found = set()
    of_class = [expert_params(program) for program in graph.classes]
    for block in graph.blocks:
        inner = graph.classes[block.class_index].params
        named = dict(zip(inner, block.params, strict=True))
        found |= {named[name] for name in of_class[block.class_index] if name in named}
    return frozenset(found)


def check_placed(program: Program, given: str) -> None:
    """Raise LayoutError where ranks of ep cannot have their own of a program's experts' weights;
    `given` says which ep.
    """
    for each in weights_of_experts(program):
        if each.why_not:
            name = each.params[0]
            raise LayoutError(
                f"{given} was given, and weights of experts, like "
                f"{program.tensor[name].fqn or name}, {each.why_not}, which ep does not place; use "
                "ep=1 and etp=1, or hold all experts' in one parameter [experts, ...]"
            )


def own_params(program: Program, ep: int, number: int) -> dict[str, str]:
    """Return the parameters of a block that a rank of `ep` has, by what the program that all ranks
    run calls them: as the first rank's.
    """
    of_modules = [each for each in weights_of_experts(program) if each.are_modules and ep > 1]
    left = {name for each in of_modules for name in each.params}
    found = {name: name for name in program.params if name not in left}
    for each in of_modules:
        found |= zip(each.of_rank(ep, 0), each.of_rank(ep, number), strict=True)
    return {name: found[name] for name in program.params if name in found}


def params_of_rank(graph: ModelGraph, block: Block, ep: int, number: int) -> dict[str, str]:
    """Return the parameters, buffers and constants of the model that a rank of `ep` has of a block,
    by the names of the program that it runs.
    """
    program = graph.classes[block.class_index]
    named = dict(zip(program.params, block.params, strict=True))
    return {inner: named[name] for inner, name in own_params(program, ep, number).items()}


def on_experts_mesh(
    program: Program, params: tuple[Placements, ...], *, ep: int, etp: int
) -> tuple[Placements, ...]:
    """Return the placements of a block's parameters where `ep` is above 1: those of experts lie on
    the experts' mesh, cut there by tp's layout where `etp` is above 1.

    Raises LayoutError where experts' own weights lie differently.
    """
    given = dict(zip(program.params, params, strict=True))
    placed = dict(given)
    for each in weights_of_experts(program):
        way, *ways = dict.fromkeys(given[name] for name in each.params)
        if ways:
            raise LayoutError(
                f"weights of experts, like {program.tensor[each.params[0]].fqn}, lie as "
                f"{' and '.join(map(str, (way, *ways)))}; pin those of all experts alike, or use "
                "ep=1"
            )
        on_etp = {"etp": way["tp"]} if etp > 1 else {}
        for number in range(ep):
            cut = Held(number) if each.are_modules else Shard(0)
            lies = Placements.of({"ep": cut} | on_etp)
            placed |= dict.fromkeys(each.of_rank(ep, number), lies)
    return tuple(placed[name] for name in program.params)


def others_weights(program: Program, ep: int) -> set[str]:
    """Return the parameters of modules of experts that the first rank of `ep` does not have, and
    what is made of these alone.
    """
    found = {
        name
        for each in weights_of_experts(program)
        for name in each.params
        if name not in each.of_rank(ep, 0)
    }
    for op in program.ops:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def matrices(program: Program) -> Iterator[tuple[str, bool]]:
    """Yield experts' parameters and what is made of them alone, and whether that has those of all
    experts.
    """
    found = {
        name: not each.are_modules for each in weights_of_experts(program) for name in each.params
    }
    yield from found.items()
    for op in program.ops:
        of = terms_of(op)
        if of and found.keys() >= {*of}:
            made = dict.fromkeys(op.outputs, bool(stacked(op)) or all(found[name] for name in of))
            found |= made
            yield from made.items()
