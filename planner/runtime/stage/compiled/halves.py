"""A joint graph cut in two: what a block's forward runs and saves, and what its backward runs.

What is saved is decided here and not by the compiler: the values of the forward that the backward
takes, which is what autograd saves of the same ops. Of ops that recomputation makes again nothing
is saved: the backward runs them itself, from what other ops left. Views cost nothing, so the memory
behind a view is saved and the view is made again. Of a buffer that the forward writes (running
statistics) a copy is saved: the next microbatch writes it again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from planner.runtime.stage.compiled.trace import Joint, NotCompilable


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A block's forward and backward, as graphs of tensors to tensors; positions say what is what.

    `forward` takes the program's tensors, `backward` the saved ones and the gradients of outputs.
    """

    forward: fx.GraphModule
    """Returns outputs and what is saved, each value once."""
    backward: fx.GraphModule | None
    """Returns gradients and factors of products, each value once; None: nothing has a gradient."""
    outputs: tuple[int, ...]
    """Where the forward returns each output of the program."""
    has_gradient: tuple[bool, ...]
    """Whether an output has one, which the backward takes."""
    saved_tensors: tuple[int, ...]
    """The program's own tensors that are saved."""
    saved_made: tuple[int, ...]
    """Where the forward returns what else is: what it makes, and copies of what it writes."""
    gradients: tuple[int | None, ...]
    """By the program's tensors: where the backward returns its gradient."""
    products: tuple[tuple[int, bool, str, int, int], ...]
    """Weights whose gradient is made outside: which tensor, whether transposed, how scaled in 8
    bits, where the backward returns x and the output's gradient."""
    needs: tuple[bool, ...]
    """By the program's tensors: whether it may need a gradient."""


def cut(joint: Joint, *, made_again: Collection[str] = ()) -> Halves:
    """Cut a joint graph; of the ops `made_again` (by the program's names) nothing is saved.

    Raises NotCompilable where these draw random numbers: they would draw others.
    """
    again = {node for node, name in joint.op_of.items() if name in made_again}
    if any(_draws(node) for node in again):
        raise NotCompilable("it draws random numbers in ops that recomputation runs again")
    results = list(
        dict.fromkeys(
            [
                *(node for node in joint.made if node is not None),
                *(node for each in joint.products for node in (each.x, each.grad)),
            ]
        )
    )
    saved = _saved(joint, results, again)
    written = _written(joint.writes)
    tensors = [node for node in joint.tensors if node in saved and node not in written]
    made = [node for node in saved if node not in tensors]
    returned = list(dict.fromkeys([*joint.outputs, *made]))
    place = {node: index for index, node in enumerate(joint.tensors)}
    return Halves(
        forward=_extracted(joint, joint.tensors, returned, writes=joint.writes),
        backward=_extracted(
            joint,
            [*tensors, *made, *joint.gradients],
            results,
            copied=_borrowed(joint, results),
        )
        if any(joint.has_gradient)
        else None,
        outputs=tuple(map(returned.index, joint.outputs)),
        has_gradient=joint.has_gradient,
        saved_tensors=tuple(place[node] for node in tensors),
        saved_made=tuple(map(returned.index, made)),
        gradients=tuple(None if node is None else results.index(node) for node in joint.made),
        products=tuple(
            (
                each.weight,
                each.transposed,
                each.scaling,
                results.index(each.x),
                results.index(each.grad),
            )
            for each in joint.products
        ),
        needs=joint.needs,
    )


def _saved(joint: Joint, results: Iterable[fx.Node], again: Collection[fx.Node]) -> list[fx.Node]:
    """Return what the backward takes of the forward, in the order in which it meets it."""
    tensors, met = set(joint.tensors), dict[fx.Node, bool]()
    waiting = list(results)[::-1]
    while waiting:
        node = waiting.pop()
        if node in met:
            continue
        is_made = node in joint.op_of and node not in again and not _is_view(node)
        met[node] = node in tensors or is_made
        if not met[node]:
            waiting.extend(reversed(node.all_input_nodes))
    return [node for node, is_saved in met.items() if is_saved]


def _written(writes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the tensors of the program that copies put back."""
    return {write.all_input_nodes[0] for write in writes}


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in memory of its first argument's."""
    if node.target is operator.getitem:
        (of, _) = node.args
        assert isinstance(of, fx.Node)
        return _is_view(of)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    infos = [each.alias_info for each in node.target._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _draws(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags
    )


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _borrowed(joint: Joint, results: Sequence[fx.Node]) -> set[fx.Node]:
    """Return gradients of parameters that lie in memory of others.

    Autograd may take a gradient over as the parameter's sum, and add to it in place.
    """
    shared = Counter(_base(node) for node in results)
    of_params = (node for node in joint.made[joint.num_inputs :] if node is not None)
    return {
        node for node in of_params if _base(node).op == "placeholder" or shared[_base(node)] > 1
    }


def _extracted(
    joint: Joint,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    writes: Sequence[fx.Node] = (),
    copied: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """Return the part of the joint graph that makes `outputs` of `inputs`, and does `writes`.

    `outputs` has what is written as it was before.
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    clone = partial(graph.call_function, torch.ops.aten.clone.default)
    before = {node: clone((env[node],)) for node in _written(writes) if node in outputs}
    needed, waiting = set[fx.Node](), [*outputs, *writes]
    while waiting:
        node = waiting.pop()
        if node in needed or node in env:
            continue
        assert node.op != "placeholder", f"{node} is neither given nor made"
        needed.add(node)
        waiting.extend(node.all_input_nodes)
    for node in joint.module.graph.nodes:
        if node not in needed:
            continue
        if node.target is torch.ops.aten.detach.default:
            env[node] = env[node.args[0]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(
        tuple(
            clone((env[node],)) if node in copied else before.get(node, env[node])
            for node in outputs
        )
    )
    graph.lint()
    return fx.GraphModule(joint.module, graph)
