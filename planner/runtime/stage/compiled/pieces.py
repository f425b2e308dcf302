"""A block's backward in pieces, so that weight gradients are made beside its collectives.

    whole     dx3 dx2 | all-reduce | dx1              | dw3 dw2 dw1
    pieces    dx3 dx2 | all-reduce / dw3 dw2 | dx1    | dw1

A graph waits for a collective where it stands. Here a piece ends where one begins beside which
weight gradients can be made, as both their factors are there: the runtime starts the collective,
makes them, waits, and runs the next piece. Collectives stay in the graph's order, as other ranks
may run their ops one by one; one beside which nothing is made stays inside a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from planner.runtime.process import collectives
from planner.runtime.stage.compiled.kernels import Compiler

_COLLECTIVES = "_c10d_functional."
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, slots=True)
class Started:
    """A collective between two pieces: where its argument lies, and where its result goes."""

    call: Callable[..., Any]
    """The functional collective."""
    taken: int
    others: tuple[Any, ...]
    """Its arguments behind the tensor."""
    given: int

    @property
    def kind(self) -> str:
        """What timelines call it."""
        name = str(getattr(self.call, "_opname", self.call))
        return name.removesuffix("_tensor").removesuffix("_into").removesuffix("_single")

    @property
    def group(self) -> str:
        """The name of its group, which is its last argument."""
        return str(self.others[-1])

    @property
    def times(self) -> int:
        """How many times what it takes the whole tensor is."""
        return int(self.others[0]) if self.kind == "all_gather" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the graph. Values have numbers: those that the whole graph takes come first."""

    module: fx.GraphModule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    forgets: tuple[int, ...]
    """What it takes, and nobody behind it."""
    started: Started | None
    """The collective behind it; None: it is the last piece."""
    products: tuple[int, ...]
    """Weight gradients that are made meanwhile, by their places among the block's products."""
    made: tuple[int, ...]
    """Factors of these that nobody needs afterwards."""
    sent: tuple[int, ...]
    """The collective's argument, where nobody needs it afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces of a backward, in order."""

    parts: tuple[Piece, ...]
    results: tuple[int, ...]
    """Which values the whole graph returns."""
    num_values: int
    """How many values there are."""


def in_pieces(
    backward: fx.GraphModule, factors: Sequence[tuple[int, int]], gradients: Collection[int]
) -> Pieces | None:
    """Return a backward in pieces; of its results `factors` are the places of each product's, and
    `gradients` those of gradients. None where no weight gradient can be made beside a collective.
    """
    graph = backward.graph
    results = _results(graph)
    pairs = [(results[x], results[grad]) for x, grad in factors]
    waits = [node for node in graph.nodes if node.target is _WAIT and _is_collective(node)]
    cuts: list[fx.Node] = []
    beside: list[tuple[int, ...]] = []
    made: set[int] = set()
    for wait in waits:
        piece = _pieces_of(graph, [*cuts, wait])
        ready = tuple(
            at
            for at, pair in enumerate(pairs)
            if at not in made and max(piece[node] for node in pair) <= len(cuts)
        )
        if ready:
            cuts.append(wait)
            beside.append(ready)
            made.update(ready)
    if not cuts:
        return None
    handed_on = {results[at] for at in gradients}
    return _cut(backward, cuts, beside, pairs, handed_on)


def _results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    (results,) = graph.output_node().args
    return tuple(results)  # type: ignore[arg-type]


def _is_collective(wait: fx.Node) -> bool:
    (started,) = wait.all_input_nodes
    return (
        len(started.users) == 1
        and str(started.target).startswith(_COLLECTIVES)
        and started.all_input_nodes == [started.args[0]]
        and not started.kwargs
    )


def _pieces_of(graph: fx.Graph, cuts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the piece that makes each node: the first one that can. Results of the n-th cut are of
    piece n + 1, and a collective behind it in the graph of no earlier one.
    """
    piece: dict[fx.Node, int] = {}
    begun = 0
    for node in graph.nodes:
        mine = max((piece[source] for source in node.all_input_nodes), default=0)
        if str(node.target).startswith(_COLLECTIVES):
            mine = max(mine, begun)
        piece[node] = mine
        if node in cuts:
            begun += 1
            piece[node] = begun
    return piece


def _cut(
    backward: fx.GraphModule,
    cuts: Sequence[fx.Node],
    beside: Sequence[tuple[int, ...]],
    pairs: Sequence[tuple[fx.Node, fx.Node]],
    handed_on: Collection[fx.Node],
) -> Pieces:
    """Cut a backward at these waits; `pairs` are the factors of products, of which those in
    `beside` are made at each, and `handed_on` is what it returns beside factors.
    """
    graph = backward.graph
    piece = _pieces_of(graph, cuts)
    starts = [wait.all_input_nodes[0] for wait in cuts]
    results = _results(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outside = {*placeholders, *cuts}
    inside: list[list[fx.Node]] = [[] for _ in range(len(cuts) + 1)]
    for node in graph.nodes:
        if node.op != "output" and node not in outside and node not in starts:
            inside[piece[node]].append(node)
    # What another piece, a collective or the whole graph's result needs has a number.
    arguments = [start.all_input_nodes[0] for start in starts]
    needed = {*arguments, *results}
    for nodes in inside:
        needed |= {
            source
            for node in nodes
            for source in node.all_input_nodes
            if source in outside or piece[source] != piece[node]
        }
    values = [*placeholders, *cuts]
    values += [node for nodes in inside for node in nodes if node in needed]
    number = {node: at for at, node in enumerate(values)}
    takes = [
        tuple(
            dict.fromkeys(
                number[source]
                for node in nodes
                for source in node.all_input_nodes
                if source not in nodes
            )
        )
        for nodes in map(dict.fromkeys, inside)
    ]
    parts = []
    made: set[int] = set()
    for at, nodes in enumerate(inside):
        start = starts[at] if at < len(cuts) else None
        mine = beside[at] if at < len(cuts) else ()

        def held(at: int = at, made: Collection[int] = frozenset(made)) -> set[int]:
            """Return what is needed behind a piece's kernels, if these products are made."""
            factors = {node for one, pair in enumerate(pairs) if one not in made for node in pair}
            return {number[node] for node in factors.union(handed_on)}.union(*takes[at + 1 :])

        behind = held() | {number[node] for node in arguments[at:]}
        made.update(mine)
        left = held(made=made) | {number[node] for node in arguments[at + 1 :]}
        sent = [] if start is None else [number[arguments[at]]]
        factors = dict.fromkeys(number[node] for one in mine for node in pairs[one])
        parts.append(
            Piece(
                module=_part(backward, nodes, [values[n] for n in takes[at]], number),
                takes=takes[at],
                gives=tuple(number[node] for node in nodes if node in number),
                forgets=tuple(n for n in takes[at] if n not in behind),
                started=None
                if start is None
                else Started(
                    start.target,  # type: ignore[arg-type]
                    number[arguments[at]],
                    tuple(start.args[1:]),
                    number[cuts[at]],
                ),
                products=mine,
                made=tuple(n for n in factors if n not in left | {*sent}),
                sent=tuple(n for n in sent if n not in left),
            )
        )
    return Pieces(
        parts=tuple(parts),
        results=tuple(number[node] for node in results),
        num_values=len(values),
    )


def _part(
    backward: fx.GraphModule,
    nodes: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    number: Mapping[fx.Node, int],
) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in taken:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in nodes if node in number))
    graph.lint()
    return fx.GraphModule(backward, graph)


class RunPieces:
    """Runs a backward's kernels piece by piece."""

    def __init__(self, pieces: Pieces, compiler: Compiler) -> None:
        self._pieces = pieces
        self._kernels = [compiler(part.module) for part in pieces.parts]

    def __call__(
        self,
        tensors: list[Tensor],
        make: Callable[[Sequence[int], Sequence[Tensor | None]], None],
    ) -> list[Tensor | None]:
        """Return what the whole graph does; the list is emptied. `make` is called with products
        and results so far, and makes their weight gradients.
        """
        pieces = self._pieces
        values: list[Tensor | None] = [*tensors, *(pieces.num_values - len(tensors)) * [None]]
        tensors.clear()
        for part, kernels in zip(pieces.parts, self._kernels, strict=True):
            taken: list[Any] = [values[at] for at in part.takes]
            for at in part.forgets:
                values[at] = None
            for at, value in zip(part.gives, kernels(taken), strict=True):
                values[at] = value
            begun = part.started
            if begun is None:
                continue

            def meanwhile(part: Piece = part) -> None:
                make(part.products, [values[at] for at in pieces.results])
                for at in part.made:
                    values[at] = None

            values[begun.given] = collectives.run(
                begun.kind,
                partial(begun.call, values[begun.taken], *begun.others),
                group=begun.group,
                sent=values[begun.taken],
                times=begun.times,
                meanwhile=meanwhile,
            )
            for at in part.sent:
                values[at] = None
        return [values[at] for at in pieces.results]
