"""The choice inside block classes, as numbers: which strategy each op takes on the tp axis.

A *variable* is an op (its values: the sharding rules' strategies) or a parameter used in
several places (its values: placements). A variable's value costs seconds (the op's local
forward and backward, and adding its parameters' gradients to their sums) and bytes (local
parameters with their gradient and optimizer state, and local outputs). An *edge* is one tensor
with all its uses in a block: when it is produced as placement p and uses require the set Q of
(placement, gradient partial?), it costs sum over q in Q of redistribute(p -> q). Uses that require
the same share one redistribution, as in the lowered program. Minimise the sum of all of it.

That is what the cost model says of a microbatch's forward and backward, but for collectives
inside losses and for what a whole block decides (a device that waits for its host, measured
corrections). Not in it: full recomputation's second forward, and what a step does once for a
parameter, its update and exchange.

`block_build` states the problem of a program at the prices of `block_prices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.language.graph import Program
from planner.language.layout.placement import OpSharding, Partial, Placement, Replicate
from planner.language.plan import ClassLayout

Boundary = Mapping[tuple[int, str], Placement]
"""Placements of what blocks hand to each other, by (class, tensor); Replicate unless named."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variable:
    """One choice: seconds and bytes of each of its values."""

    name: str
    values: tuple[Any, ...]
    seconds: NDArray[np.float64]
    num_bytes: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReshardEdge:
    """One tensor between its producer and its uses."""

    tensor: str
    """Its name."""
    producer: int | None
    """The variable that makes it; None where its placement is given."""
    source: tuple[int, ...]
    """The row of `seconds` for each value of the producer."""
    uses: tuple[tuple[int | None, tuple[int, ...]], ...]
    """For each use its variable (None: given) and the column of `seconds` for each value of it."""
    seconds: NDArray[np.float64]
    """Of the redistribution from each source to each requirement; inf where there is none."""
    tables: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """What `eliminate` made of it, by the most cells of one table: problems share edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice: value index of each variable, the objective, and what part of it is unproved.

    A `gap` of 0 is an optimum; of 0.1, at most a tenth of `cost` more than one.
    """

    values: tuple[int, ...]
    cost: float
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockProblem:
    """Variables and edges of one block class, or of several that share a parameter: each of these
    counts as often as the model has its blocks, in parts of the most blocks of any of them.

    Problems of other boundaries have most of them in common.
    """

    axis_size: int
    """Ranks of the mesh axis."""
    variables: tuple[Variable, ...]
    """Ops, and parameters used in several places."""
    edges: tuple[ReshardEdge, ...]
    """What redistributing each tensor costs."""
    programs: tuple[tuple[int, Program], ...]
    """Class index and program of each block class."""
    shared: tuple[tuple[tuple[tuple[int, str], ...], int], ...] = ()
    """Parameters that several uses share, as (class index, name), and the variable of each."""
    boundary: Boundary = field(default_factory=dict)
    """Placements of what blocks hand to each other."""
    integer_programs: dict[str, Any] = field(default_factory=dict)
    """What `search.ilp.blocks` made of it, by solver."""

    def value(self, choice: Sequence[int], bytes_price: float = 0.0) -> float:
        """Return the objective of one full choice: seconds + bytes_price * bytes."""
        total = 0.0
        for variable, value in zip(self.variables, choice, strict=True):
            total += float(variable.seconds[value] + bytes_price * variable.num_bytes[value])
        for edge in self.edges:
            row = edge.source[choice[edge.producer] if edge.producer is not None else 0]
            # A set: uses that require the same share one redistribution.
            for column in {
                requirements[choice[u] if u is not None else 0] for u, requirements in edge.uses
            }:
                total += float(edge.seconds[row, column])
        return total

    def num_bytes(self, choice: Sequence[int]) -> float:
        """Return the bytes of one full choice."""
        chosen = zip(self.variables, choice, strict=True)
        return float(sum([variable.num_bytes[value] for variable, value in chosen]))


def is_sharded(sharding: OpSharding) -> bool:
    """Whether any input or output of the op is not replicated."""
    return any(not isinstance(p, Replicate) for p in (*sharding.inputs, *sharding.outputs))


def at_rest(required: Placement) -> Placement:
    """Return how a parameter with one use lies: as required, but whole where a term is required.

    A bias added to a partial sum is taken by one rank only; every rank holds it.
    """
    return Replicate() if isinstance(required, Partial) else required


def read_layouts(problem: BlockProblem, choice: Sequence[int]) -> dict[int, ClassLayout]:
    """Return the ClassLayout of each class that a solved choice means."""
    picked = {v.name: v.values[i] for v, i in zip(problem.variables, choice, strict=True)}
    param_place = {
        member: problem.variables[variable].values[choice[variable]]
        for members, variable in problem.shared
        for member in members
    }
    layouts = {}
    for class_index, program in problem.programs:
        ops = {op.name: picked[f"{class_index}:{op.name}"] for op in program.ops}
        # A parameter with one use has no variable: it lies as its reader takes it.
        first_read: dict[str, tuple[str, int]] = {}
        for op in program.ops:
            for position, name in enumerate(op.inputs):
                first_read.setdefault(name, (op.name, position))
        params = []
        for name in program.params:
            place = param_place.get((class_index, name))
            if place is None and name in first_read and program.tensor[name].kind == "param":
                reader, position = first_read[name]
                place = ops[reader].inputs[position]
            params.append(str(at_rest(place or Replicate())))
        layouts[class_index] = ClassLayout(
            class_index=class_index,
            inputs=_boundary_texts(problem, class_index, program.inputs),
            params=tuple(params),
            outputs=_boundary_texts(problem, class_index, program.outputs),
            ops=tuple(
                (name, str(sharding))
                for name, sharding in ops.items()
                if isinstance(sharding, OpSharding) and is_sharded(sharding)
            ),
        )
    return layouts


def _boundary_texts(
    problem: BlockProblem, class_index: int, names: Sequence[str]
) -> tuple[str, ...]:
    return tuple(str(problem.boundary.get((class_index, name), Replicate())) for name in names)
