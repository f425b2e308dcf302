"""Program → torch.fx.GraphModule: plain ATen calls and our collectives, nothing else.

The module has no state: parameters are arguments, so all blocks of a class share one
module, and the holder of the parameters (a plain stage, FSDP2) passes them.
`torch.compile` takes the result as it is.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from planner.errors import LayoutError, ModelError
from planner.language.across.cut.batch_statistics import MOMENTUM_ARGUMENT, counters
from planner.language.graph import Affine, Op, Program, Ref, Symbol
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.graph.tables import TABLE_LOOKUP
from planner.language.layout.placement import Shard, parse_placement
from planner.language.layout.redistribute import GATHER_SAMPLES, OWN_SAMPLES, REDISTRIBUTE
from planner.language.ops.families.entries.routing import STACK_OF_RUNS
from planner.language.ops.families.losses.in_chunks import LOSS_IN_CHUNKS
from planner.language.ops.families.products.narrow import NARROW_RUNS, scaling_of
from planner.language.ops.record import is_random
from planner.language.ops.weight_products import (
    InPieces,
    deferrable_products,
    in_pieces,
    products_beside,
)
from planner.runtime.process import collectives
from planner.runtime.stage.beside_collectives import BesideCollectives, RedistributeBeside
from planner.runtime.stage.bindings import BINDINGS
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.calls.autograd_functions import autograd_function
from planner.runtime.stage.calls.complex_writes import COMPLEX_WRITES
from planner.runtime.stage.calls.exchanges.experts import deal_runs, exchange_rows
from planner.runtime.stage.calls.exchanges.gathered_experts import gather_rows, scatter_rows
from planner.runtime.stage.calls.exchanges.samples import gather_samples, own_samples
from planner.runtime.stage.calls.exchanges.table_rows import exchanged_embedding
from planner.runtime.stage.calls.losses.in_chunks import cross_entropy_in_chunks
from planner.runtime.stage.calls.opaque_modules import find_module, opaque_module, own_params
from planner.runtime.stage.calls.part_of import part_of
from planner.runtime.stage.calls.pure import PURE
from planner.runtime.stage.calls.rows.narrow_runs import narrow_runs
from planner.runtime.stage.calls.rows.table_lookup import table_lookup
from planner.runtime.stage.in_pieces import GatheredInPieces, ScatteredInPieces
from planner.runtime.stage.recompute import Keeper, KeptOp
from planner.runtime.stage.weight_grads import Pending, WeightProduct, WeightQueue, narrow_product


def to_graph_module(
    program: Program,
    groups: Mapping[str, ProcessGroup | None],
    device: torch.device,
    *,
    weight_queue: WeightQueue | None = None,
    beside: BesideCollectives | None = None,
    pieces: int = 1,
    keeper: Keeper | None = None,
    made_again: frozenset[str] = frozenset(),
) -> fx.GraphModule:
    """Return a module called as ``gm(*inputs, *params) -> tuple(outputs)``.

    `program` is bound (no Affine left). `groups` gives the process group of each mesh axis
    that its ``planner.*`` ops name; None stands for an axis of size one, on which they act
    on the whole tensor. With a `weight_queue`, products with trained weights add their
    weight gradients to the sums themselves, and can defer them in it; given `beside`, those behind
    which a collective of the backward follows make theirs beside it. In so many `pieces` gathers
    and scatters of a forward go beside the products next to them. With a `keeper`, the
    results of all ops but those named in `made_again` can be kept where a block is recomputed.
    Raises LayoutError for an op of ours that does not exist or an axis without a group.
    """
    graph = fx.Graph()
    root = torch.nn.Module()
    ways: dict[str, str] = {}  # by op: what products are called that it is one of
    hides: Mapping[str, tuple[str, ...]] = {}
    products = deferrable_products(program)
    cut = in_pieces(program, pieces, made_again)
    if weight_queue is not None:
        ways = dict.fromkeys(products, "")
    else:
        ways = dict.fromkeys(cut.products, "")
    if ways:
        _add_products(root, "", program, weight_queue)
    if beside is not None:
        hides = products_beside(program)
        ways |= {name: "_beside" for names in hides.values() for name in names}
        _add_products(root, "_beside", program, weight_queue, beside.waiting)
        root.add_module("redistribute_beside", RedistributeBeside(beside))
    env = {name: graph.placeholder(_identifier(name)) for name in program.inputs}
    env |= {name: graph.placeholder(_identifier(name)) for name in program.params}
    calls = {}
    counted = counters(program)
    for op in program.ops:
        if op.name in counted:
            op = _with_momentum(graph, op, env, counted[op.name])
        if op.name in ways:
            x, weight, bias, transposed = products[op.name]
            node = graph.call_module(
                _MODULES[transposed] + scaling_of(op) + ways[op.name],
                tuple(env[ref.name] for ref in (x, weight, bias) if ref is not None),
            )
            env[op.outputs[0]] = node
        elif op.target.startswith("planner."):
            adds = weight_queue is not None
            node = _emit_own(graph, program, op, env, groups, device, adds=adds)
            if op.name in hides:
                node.op, node.target = "call_module", "redistribute_beside"
        else:
            made = program.tensor.get(op.outputs[0])
            is_complex = made is not None and made.dtype.startswith("complex")
            node = _emit_aten(graph, op, env, device, is_complex=is_complex)
        calls[op.name] = node
    _run_in_pieces(program, graph, cut, pieces, calls, env)
    if keeper is not None:
        _keep_results(program, root, calls, env, keeper, made_again)
    graph.output(tuple(env[name] for name in program.outputs))
    graph.lint()
    module = fx.GraphModule(root, graph, class_name="".join(_words(program.name)))
    # Whose op a line of its code is, for messages (`planner.runtime.step.update.values`).
    module.meta["lines"] = {calls[op.name].name: (op.name, op.line) for op in program.ops}
    return module


def _add_products(
    root: torch.nn.Module,
    suffix: str,
    program: Program,
    queue: WeightQueue | None,
    waiting: list[Pending] | None = None,
) -> None:
    """Add the modules that multiply by a trained weight, for all scalings in a program."""
    scalings = {"", *map(scaling_of, program.ops)}
    for transposed, scaling in product(_MODULES, sorted(scalings)):
        module = WeightProduct(queue, transposed=transposed, scaling=scaling, waiting=waiting)
        root.add_module(_MODULES[transposed] + scaling + suffix, module)


def _run_in_pieces(
    program: Program,
    graph: fx.Graph,
    cut: InPieces,
    pieces: int,
    calls: Mapping[str, fx.Node],
    env: Mapping[str, fx.Node],
) -> None:
    """Hand what is made in pieces to the ops of which it is the result; `calls` are their nodes."""
    products = deferrable_products(program)
    op_of = {op.name: op for op in program.ops}

    def shared(target: type, before: fx.Node, moved: str, shard: object, factors: Any) -> fx.Node:
        """Return the node of what the ops of a pair share in a call of the block."""
        placement = parse_placement(str(shard))
        assert isinstance(placement, Shard)
        with graph.inserting_before(before):
            group = calls[moved].args[1]
            return graph.call_function(target, (group, placement.dim, pieces, factors))

    def factor(name: str) -> tuple[Any, ...]:
        _, weight, bias, transposed = products[name]
        found = None if bias is None else env[bias.name]
        return env[weight.name], found, transposed, scaling_of(op_of[name])

    def hand(to: str, holder: fx.Node, *what: Any) -> None:
        node = calls[to]
        with graph.inserting_before(node):
            node.kwargs = {"made": graph.call_function(_method, (holder, *what))}

    for moved, takers in cut.gathered.items():
        if not calls[moved].args[1]:  # an axis of size one
            continue
        factors = tuple(map(factor, takers))
        shard = op_of[moved].args[2]
        holder = shared(GatheredInPieces, calls[moved], moved, shard, factors)
        hand(moved, holder, "gather")
        for at, taker in enumerate(takers):
            hand(taker, holder, "take", at)
    for maker, moved in cut.scattered.items():
        if not calls[moved].args[1]:  # an axis of size one
            continue
        shard = op_of[moved].args[3]
        holder = shared(ScatteredInPieces, calls[maker], moved, shard, factor(maker))
        hand(maker, holder, "multiply")
        hand(moved, holder, "scatter")


def _method(of: object, name: str, *bound: Any) -> Any:
    """Return a method, with the arguments `bound` to it."""
    return partial(getattr(of, name), *bound)


def _with_momentum(graph: fx.Graph, op: Op, env: dict[str, fx.Node], counter: str) -> Op:
    """Return a cumulative BatchNorm's op with the momentum that follows from its counter."""
    made = f"{op.name} momentum"
    env[made] = graph.call_function(_momentum_of, (env[counter],))
    before, after = op.args[:MOMENTUM_ARGUMENT], op.args[MOMENTUM_ARGUMENT + 1 :]
    return replace(op, args=(*before, Ref(made), *after))


def _momentum_of(counter: torch.Tensor) -> float:
    """One over the steps that a layer has counted, the present one among them."""
    return 1.0 / counter.item()


def aten_overload(target: str) -> torch._ops.OpOverload:
    """Return the overload a target such as ``aten.linear.default`` names.

    Raises ModelError for an op of a library that is not imported here.
    """
    namespace, packet, overload = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise ModelError(
            f"the model calls {namespace}::{packet}, which is not defined in this process; import "
            "the library that defines it at the top of the model's file, not where it is used"
        ) from None


def import_libraries(names: Iterable[str]) -> None:
    """Import the libraries that define a model's ops (`ModelGraph.libraries`), as its forward did
    where it was captured.
    """
    for name in names:
        with suppress(ImportError):  # a script's own: it has run here
            importlib.import_module(name)


def _keep_results(
    program: Program,
    root: torch.nn.Module,
    calls: Mapping[str, fx.Node],
    env: Mapping[str, fx.Node],
    keeper: Keeper,
    made_again: frozenset[str],
) -> None:
    """Make each op that does not run again a `KeptOp`; `calls` are the ops' nodes."""
    # Between the two kinds of ops: what a kept op takes of ops that run again can be found there in
    # the second run; what it makes is stored only if such an op reads it.
    repeated = [op for op in program.ops if op.name in made_again]
    makes = {env[name] for op in repeated for name in op.outputs}
    reads = {name for op in repeated for name in op.inputs}
    for index, op in enumerate(op for op in program.ops if op.name not in made_again):
        node = calls[op.name]
        leaves = tree_leaves((node.args, node.kwargs))
        root.add_module(
            f"kept_{index}",
            KeptOp(
                keeper,
                root.get_submodule(node.target) if isinstance(node.target, str) else node.target,
                made_again=frozenset(i for i, leaf in enumerate(leaves) if leaf in makes),
                is_read=tuple(name in reads for name in op.outputs),
                is_random=is_random(op),
            ),
        )
        node.op, node.target = "call_module", f"kept_{index}"


def _emit_aten(
    graph: fx.Graph,
    op: Op,
    env: dict[str, fx.Node],
    device: torch.device,
    *,
    is_complex: bool,
) -> fx.Node:
    target = aten_overload(op.target)
    own = (COMPLEX_WRITES.get(op.target) if is_complex else None) or PURE.get(op.target)
    node = graph.call_function(
        own or BINDINGS.get(op.target, target),
        tuple(_fx_arg(arg, env, device) for arg in op.args),
        {key: _fx_arg(arg, env, device) for key, arg in op.kwargs},
    )
    returns = target._schema.returns
    many = len(returns) > 1 or isinstance(returns[0].type, torch.ListType)
    _name_outputs(graph, op, node, env, many=many)
    return node


def _emit_own(
    graph: fx.Graph,
    program: Program,
    op: Op,
    env: dict[str, fx.Node],
    groups: Mapping[str, ProcessGroup | None],
    device: torch.device,
    *,
    adds: bool,
) -> fx.Node:
    """Call one of our functions; an argument named for a group carries the axis in the IR.

    `adds`: what makes weight gradients may add them to their sums itself.
    """
    scaling = scaling_of(op)
    name = op.target.removeprefix("planner.").removesuffix(f".{scaling}")
    function = _OWN.get(name) or getattr(local_ops, name, None)
    if function is None:
        raise LayoutError(f"op {op.name} has the unknown target {op.target!r}")
    bound = _signature(function).bind(
        *(_fx_arg(arg, env, device) for arg in op.args),
        **{key: _fx_arg(arg, env, device) for key, arg in op.kwargs},
    )
    if op.target == TABLE_LOOKUP and op.inputs[0] not in program.params:
        raise LayoutError(
            f"op {op.name} looks up rows of a table whose gradient is sparse, and the plan has the "
            "lookup or its table otherwise than whole or by columns; search again, without `cp`"
        )
    if op.target == REDISTRIBUTE:
        collectives.check_way(str(op.args[2]), str(op.args[3]))
    if op.target == OPAQUE_MODULE:
        find_module(str(op.args[0]))  # in time, not in the first step
        bound.arguments["own_names"] = own_params(program, op)
    if op.target == STACK_OF_RUNS:
        bound.arguments["own_names"] = own_params(program, op)
    if scaling:
        bound.arguments["scaling"] = scaling
    if op.target == LOSS_IN_CHUNKS:
        bound.arguments["adds"] = adds
    for argument in ("group", "outer_group", "outermost_group"):
        axis = bound.arguments.get(argument)
        if axis is None:
            continue
        if axis not in groups:
            raise LayoutError(f"op {op.name} runs on axis {axis!r}; groups given: {sorted(groups)}")
        group = groups[axis]
        # The IR names an axis, which is the same on all ranks; the name of a group is this rank's
        # own.
        bound.arguments[argument] = "" if group is None else group.group_name
    node = graph.call_function(function, bound.args, bound.kwargs)
    _name_outputs(graph, op, node, env, many=len(op.outputs) > 1)
    return node


def _narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: str = ""
) -> Tensor:
    return narrow_product(x, weight, bias, transposed=True, scaling=scaling)


def _narrow_addmm(bias: Tensor, x: Tensor, weight: Tensor, *, scaling: str = "") -> Tensor:
    return narrow_product(x, weight, bias, transposed=False, scaling=scaling)


_MODULES = {True: "linear", False: "matmul"}
"""Modules of a program that multiply by a trained weight, by whether it is transposed."""


_OWN: dict[str, Callable[..., Any]] = {
    "linear": _narrow_linear,
    "addmm": _narrow_addmm,
    "cross_entropy_in_chunks": cross_entropy_in_chunks,
    "exchanged_embedding": exchanged_embedding,
    "deal_runs": deal_runs,
    "exchange_rows": exchange_rows,
    "gather_rows": gather_rows,
    "scatter_rows": scatter_rows,
    "part_of": part_of,
    NARROW_RUNS.removeprefix("planner."): narrow_runs,
    "redistribute": collectives.redistribute,
    "table_lookup": table_lookup,
    AUTOGRAD_FUNCTION.removeprefix("planner."): autograd_function,
    GATHER_SAMPLES.removeprefix("planner."): gather_samples,
    OPAQUE_MODULE.removeprefix("planner."): opaque_module,
    OWN_SAMPLES.removeprefix("planner."): own_samples,
}


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _name_outputs(
    graph: fx.Graph, op: Op, node: fx.Node, env: dict[str, fx.Node], *, many: bool
) -> None:
    if not many:
        env[op.outputs[0]] = node
        return
    for index, name in enumerate(op.outputs):
        env[name] = graph.call_function(operator.getitem, (node, index))


def _fx_arg(arg: Any, env: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return env[arg.name]
    if isinstance(arg, tuple):
        return [_fx_arg(item, env, device) for item in arg]
    if isinstance(arg, Symbol):
        return arg.constant(torch, device)
    if isinstance(arg, Affine):
        raise LayoutError("the program still depends on the microbatch size; bind it first")
    return arg


def _words(name: str) -> list[str]:
    cleaned = "".join(c if c.isalnum() else " " for c in name)
    return ["Program", *(word.capitalize() for word in cleaned.split())]


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
