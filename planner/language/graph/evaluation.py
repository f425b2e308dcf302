"""A model in evaluation mode as the graph that a plan was made for, with other ops' arguments.

The layouts, stages and parameters of a plan belong to the graph of the model in training mode.
In evaluation mode the same modules mostly run the same ops with other arguments (a dropout that
keeps all, a normalisation that reads its running statistics), or leave some out (a counter of
batches). Such a capture is aligned with the graph, op by op, and takes the names there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import PlanError
from planner.language.graph.model_graph import Block, ModelGraph, Op, Program, Ref, map_refs


def evaluation_graph(graph: ModelGraph, captured: ModelGraph) -> ModelGraph:
    """Return `graph` with the classes that `captured`, the same model in evaluation mode, has.

    Raises PlanError, naming the first op, where the model computes in evaluation mode what it does
    not in training.
    """
    names = [[block.name for block in each.blocks] for each in (graph, captured)]
    if names[0] != names[1]:
        raise _differs("its blocks are others")
    # The capture's tensors between blocks, as the graph names them.
    across = dict(zip(captured.batch_inputs, graph.batch_inputs, strict=True))
    across |= _preamble_names(graph, captured, across)
    across |= _whole_names(graph, captured, across)
    classes: dict[int, Program] = {}
    for block, other in zip(graph.blocks, captured.blocks, strict=True):
        program = _aligned(graph, block, captured, other, across)
        across |= zip(other.outputs, block.outputs, strict=True)
        if classes.setdefault(block.class_index, program) != program:
            raise _differs(f"blocks that are equal in training are not (block {block.name})")
    return replace(graph, classes=tuple(classes[index] for index in range(len(graph.classes))))


def _preamble_names(
    graph: ModelGraph, captured: ModelGraph, across: dict[str, str]
) -> dict[str, str]:
    """Return the names in the graph of what the capture makes without parameters, for all blocks.

    The preamble of training runs in evaluation, too: other arguments are refused.
    """
    names = dict(across)
    where = "what it makes of the batch alone"
    _refuse_others(graph, graph.preamble, captured, captured.preamble, names, where)
    return names


def _whole_names(graph: ModelGraph, captured: ModelGraph, across: dict[str, str]) -> dict[str, str]:
    """Return the names in the graph of what blocks take of the whole batch, as in training."""
    own, other = graph.whole, captured.whole
    if own is None and other is None:
        return {}
    where = "what it makes of the whole batch"
    if own is None or other is None or own.names != other.names:
        raise _differs(f"{where} is other values")
    names = dict(across)
    _refuse_others(graph, own.program, captured, other.program, names, where)
    if [(n, names.get(o, o)) for n, o in (*other.values, *other.shares)] != [
        *own.values,
        *own.shares,
    ]:
        raise _differs(f"{where} is other values")
    return {name: name for name in own.names}


def _refuse_others(
    graph: ModelGraph,
    program: Program,
    captured: ModelGraph,
    evaluated: Program,
    names: dict[str, str],
    where: str,
) -> None:
    """Raise PlanError where a program without parameters is another in evaluation mode. Adds what
    it reads and makes to `names`.
    """
    held = {key: name for name in program.params for key in _keys(graph, name)}
    for name in evaluated.params:
        key = next((key for key in _keys(captured, name) if key in held), None)
        if key is None:
            raise _differs(f"{where} reads {captured.tensor[name].fqn or 'a constant'}")
        names[name] = held[key]
    own = {op.name: op for op in program.ops}
    for op in _in_names_of(program, evaluated, names, where):
        if (op.args, op.kwargs) != (own[op.name].args, own[op.name].kwargs):
            raise _differs(f"{where} has other arguments in {op.target} ({op.line})")


def _aligned(
    graph: ModelGraph, block: Block, captured: ModelGraph, other: Block, across: dict[str, str]
) -> Program:
    """Return the other block's program in the names of the block's own."""
    program, evaluated = graph.classes[block.class_index], captured.classes[other.class_index]
    where = f"block {block.name}"
    if len(program.inputs) != len(evaluated.inputs):
        raise _differs(f"{where} takes {len(evaluated.inputs)} tensors, not {len(program.inputs)}")
    # Inputs are in the order of their use, which may be another in evaluation mode.
    places = dict(zip(block.inputs, program.inputs, strict=True))
    names = {}
    for name_in_class, name in zip(evaluated.inputs, other.inputs, strict=True):
        if across.get(name) not in places:
            raise _differs(f"{where} takes {name}")
        names[name_in_class] = places[across[name]]
    own = {
        key: name_in_class
        for name_in_class, name in _params(program, block)
        for key in _keys(graph, name)
    }
    for name_in_class, name in _params(evaluated, other):
        key = next((key for key in _keys(captured, name) if key in own), None)
        if key is None:
            raise _differs(f"{where} reads {captured.tensor[name].fqn or 'a constant'}")
        names[name_in_class] = own[key]
    ops = tuple(_in_names_of(program, evaluated, names, where))
    made = {name for op in ops for name in op.outputs} | {*program.inputs, *program.params}
    outputs = tuple(names.get(name, "") for name in evaluated.outputs)
    if outputs != program.outputs or not made.issuperset(outputs):
        raise _differs(f"{where} hands on other tensors")
    return replace(program, ops=ops)


def _params(program: Program, block: Block) -> Iterator[tuple[str, str]]:
    yield from zip(program.params, block.params, strict=True)


def _keys(graph: ModelGraph, name: str) -> list[tuple[object, ...]]:
    """Return what names a tensor in every capture: a parameter's or buffer's names in the module,
    of which a tied one that has no values any more may show another; a constant's values.
    """
    meta = graph.tensor[name]
    if not meta.fqn:
        return [(meta.kind, meta.shape, meta.dtype, meta.data)]
    return [(meta.kind, fqn) for fqn in (meta.fqn, *meta.aliases)]


def _in_names_of(
    program: Program, evaluated: Program, names: dict[str, str], where: str
) -> Iterator[Op]:
    """Yield the ops of a program, each under the name of the op of training that it stands for:
    the next one of its target, its module and its results. Adds what they make to `names`.
    """

    def renamed(ref: Ref) -> Ref:
        return Ref(names[ref.name])

    candidates = iter(program.ops)
    for op in evaluated.ops:
        shapes = [evaluated.tensor[name].shape for name in op.outputs]
        for twin in candidates:
            if (op.target, op.module) == (twin.target, twin.module) and shapes == [
                program.tensor[name].shape for name in twin.outputs
            ]:
                break
        else:
            raise _differs(f"{where} runs {op.target} of {op.module or 'its forward'} ({op.line})")
        names.update(zip(op.outputs, twin.outputs, strict=True))
        args, kwargs = (map_refs(given, renamed) for given in (op.args, op.kwargs))
        yield replace(twin, args=args, kwargs=kwargs, line=op.line)


def _differs(how: str) -> PlanError:
    return PlanError(
        f"in evaluation mode the model computes what it does not in training: {how}; evaluate a "
        "copy of it: model.load_state_dict(engine.full_state_dict(), assign=True)"
    )
