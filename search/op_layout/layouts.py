"""Placements inside every block class for one tp degree and microbatch size.

Builds the block problem from the sharding rules and the profile, solves it (elimination, or an
integer program where a table would grow too wide or the request names it, a relaxation where that
would be too large) and returns one `ClassLayout` per class. Classes that share a parameter are
solved together, so a tied parameter lies the same way wherever it is used.

Blocks hand each other whole tensors, or tensors split along the sequence (what Megatron calls
sequence parallelism); each is solved. For each, layouts are the points of the front of time
against memory (`front`). A layout that is slower than another and saves next to nothing against
it is dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from costmodel.topology import group_along
from planner.errors import ProfileError
from planner.language.graph import ModelGraph, Program
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Placement
from planner.language.ops.registry import segment_counts, strategies
from planner.language.stacks.tensor_parallel import UsualTp
from profiles import Profile
from search.op_layout.block_build import build_block_problems
from search.op_layout.block_prices import BoundClass, OpSeconds, OpSignature, Prices
from search.op_layout.block_problem import BlockProblem, Boundary, Choice
from search.op_layout.boundaries import boundary_options, class_groups, shared_params
from search.op_layout.eliminate import TooWide, solve_by_elimination
from search.op_layout.front import LayoutPoint, Layouts, find_front

ELIMINATION = "variable elimination"
"""The solver that takes no time to speak of."""
INTEGER_PROGRAM = "integer programs"
_MOST_PAIRS = 25_000
"""How large an integer program is tried."""

# Between equally fast strategies take the smaller one: a byte is worth far less than any
# time a strategy could save (links move one in 1e-12 s or more).
_FAST_PRICE = 1e-18
# At so many fair prices bytes alone decide, and seconds between choices of as many bytes.
_ANY_PRICE = 1e4
# A leaner layout that saves less than this part of the bytes is not worth pricing.
_LEAST_SAVING = 0.02
# What a search may spend on block problems that elimination does not solve, and the part of what is
# left of it that one problem may take: the first are solved best, and hundreds end all the same.
_WIDE_S, _PART = 40.0, 0.125
# The same where integer programs are to solve all of them: a few hundred of up to a second.
_EVERY_S = 600.0


@dataclass(kw_only=True)
class LayoutSolver:
    """Solves and remembers the layouts of a model; grows its memo as it is asked.

    Attributes:
        graph: the model.
        profile: the machine.
        pins: placements that layouts must have, by (class index, tensor).
        usual: how a stack splits layers over tp, which layouts then follow; None: anyhow.
        prefers_ilp: whether an integer program is tried before elimination.
        gap: what part of a block's cost the layouts asked for so far leave unproved, at most.
    """

    graph: ModelGraph
    profile: Profile
    pins: Mapping[tuple[int, str], Placement] = field(default_factory=dict)
    usual: UsualTp | None = None
    prefers_ilp: bool = False
    _sized: dict[tuple[int, int], SizedLayouts] = field(default_factory=dict)
    """Layouts by (tp, microbatch size)."""
    solved: dict[SizedLayouts, tuple[LayoutPoint, ...]] = field(default_factory=dict)
    """The fastest points of each kind of block boundaries, of the last size."""
    _prices: dict[int, Prices] = field(default_factory=dict)
    """Prices of ops and redistributions, by tp."""
    _segments_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Counts of segments worth trying, by microbatch size."""
    _counts: dict[int, Mapping[OpSignature, int]] = field(default_factory=dict)
    """How often the model has each op that takes time, by microbatch size."""
    _bound: dict[tuple[int, int], BoundClass] = field(default_factory=dict)
    """Block classes with every size a number, by (class, microbatch size)."""
    _spent_s: float = 0.0
    """Seconds of problems that elimination did not solve."""
    gap: float = 0.0
    _solvers: set[str] = field(default_factory=set)
    """Names of the solvers that found a layout."""

    def at(self, tp: int, microbatch_size: int) -> SizedLayouts:
        """Return the layouts on so many ranks of tp, of a microbatch size."""
        key = tp, microbatch_size
        if key not in self._sized:
            self._sized[key] = SizedLayouts(solver=self, tp=tp, microbatch_size=microbatch_size)
        return self._sized[key]

    @cached_property
    def shared(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Groups of class parameters that are one parameter of the model."""
        return shared_params(self.graph)

    def program(self, class_index: int, microbatch_size: int) -> Program:
        """Return a class's program with every size a number."""
        return self.bound_class(class_index, microbatch_size).program

    def bound_class(self, class_index: int, microbatch_size: int) -> BoundClass:
        """Return a class with every size a number."""
        key = (class_index, microbatch_size)
        if key not in self._bound:
            program = self.graph.classes[class_index].bind(microbatch_size)
            members = {member for group in self.shared for member in group}
            shared = frozenset(name for index, name in members if index == class_index)
            self._bound[key] = BoundClass(class_index=class_index, program=program, shared=shared)
        return self._bound[key]

    @property
    def proof(self) -> str:
        """Which solvers found the layouts asked for so far, and what they could not prove."""
        names = " and ".join(sorted(self._solvers)) or "nothing to choose"
        left = f", up to {self.gap:.2g} of a block's seconds unproved" if self.gap else ""
        return f"{names}, whole or split block boundaries{left}"

    def boundaries(self, tp: int) -> list[dict[tuple[int, str], Placement]]:
        """Return the placements to try of what blocks hand to each other."""
        options = boundary_options(self.graph, tp)
        if self.usual is None:
            return options
        return [boundary for boundary in options if self.usual.hands_on(boundary)]

    def can_split(self, tp: int) -> bool:
        """Whether any op has a sharded strategy at this degree."""
        if tp > 1 and not self.boundaries(tp):
            return False
        for index in range(len(self.graph.classes)):
            program = self.program(index, 1)
            for op in program.ops:
                uses_param = any(program.tensor[n].kind == "param" for n in op.inputs)
                # The first strategy is the replicated one.
                if uses_param and len(strategies(op, program.tensor, tp)) > 1:
                    return True
        return False

    def ops_that_take_time(self, microbatch_size: int) -> Mapping[OpSignature, int]:
        """Return how often the model has each op, but for those that only make views."""
        if microbatch_size not in self._counts:
            counts: Counter[OpSignature] = Counter()
            for index, count in self.uses.items():
                for signature in self.bound_class(index, microbatch_size).signatures:
                    counts[signature] += count
            seconds = self._op_seconds
            self._counts[microbatch_size] = {
                signature: count
                for signature, count in counts.items()
                # A view takes no time on whole tensors, nor on shards.
                if seconds.of(signature)(signature.shapes)
            }
        return self._counts[microbatch_size]

    def prices_on(self, tp: int) -> Prices:
        """Return what ops and redistributions take on so many ranks of tp."""
        if tp not in self._prices:
            group = group_along(self.profile.cluster, Degrees(tp=tp), "tp")
            self._prices[tp] = Prices(ops=self._op_seconds, group=group, axis_size=tp)
        return self._prices[tp]

    def segments(self, microbatch_size: int) -> tuple[int, ...]:
        """Return the counts of segments worth trying anywhere in the model (fused q, k, v)."""
        if microbatch_size not in self._segments_of:
            programs = [self.program(i, microbatch_size) for i in range(len(self.graph.classes))]
            counts = {count for program in programs for count in segment_counts(program)}
            self._segments_of[microbatch_size] = tuple(sorted(counts))
        return self._segments_of[microbatch_size]

    def choose(
        self, problems: Sequence[BlockProblem], price: float = _FAST_PRICE
    ) -> tuple[Choice, ...]:
        """Solve each problem at a price of a byte."""
        choices = []
        for problem in problems:
            began = time.perf_counter()
            # A budget of the whole search, of which each wide problem takes a part of what is left.
            left_s = (_EVERY_S if self.prefers_ilp else _WIDE_S) - self._spent_s
            choice, solver = solve_block(
                problem,
                price,
                prefers_ilp=self.prefers_ilp,
                time_limit_s=_PART * max(0.0, left_s),
            )
            if solver != ELIMINATION:
                self._spent_s += time.perf_counter() - began
            self._solvers.add(solver)
            self.gap = max(self.gap, choice.gap)
            choices.append(choice)
        return tuple(choices)

    @cached_property
    def _op_seconds(self) -> OpSeconds:
        return OpSeconds(profile=self.profile)

    @cached_property
    def uses(self) -> Mapping[int, int]:
        """How many blocks each class has."""
        return Counter(block.class_index for block in self.graph.blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedLayouts:
    """Layouts on so many ranks of tp, of a microbatch size; remembers answers."""

    solver: LayoutSolver
    tp: int
    microbatch_size: int

    @cached_property
    def least_seconds(self) -> float:
        """What ops of all blocks take at least, wherever their tensors lie."""
        solver, size = self.solver, self.microbatch_size
        prices, segments = solver.prices_on(self.tp), solver.segments(size)
        # No redistribution counts, and strategies need not go together: no layout takes less.
        return sum(
            count * float(prices.of_op(signature, segments)[1].min())
            for signature, count in solver.ops_that_take_time(size).items()
        )

    @cached_property
    def fastest(self) -> Layouts:
        """The fastest layouts between any kind of block boundaries."""
        solved = self._solve()
        # Only the last solution is kept: leaner layouts of the same size are sought next.
        self.solver.solved = {self: solved}
        return min(solved, key=lambda point: point.seconds).layouts()

    @cached_property
    def worth_pricing(self) -> tuple[Layouts, ...]:
        """The layouts worth pricing, fastest first, each with fewer bytes than the last."""
        found = [point for fast in self._fast_points for point in self._front(fast)]
        kept: list[LayoutPoint] = []
        # Fastest first: a slower point has to save clearly against each that is kept.
        for point in sorted(found, key=lambda point: point.seconds):
            if all(point.num_bytes < (1 - _LEAST_SAVING) * other.num_bytes for other in kept):
                kept.append(point)
        return tuple(point.layouts() for point in kept)

    @cached_property
    def leanest(self) -> tuple[Layouts, ...]:
        """The layouts of fewest bytes between each kind of boundaries, however slow."""
        return tuple(
            self._at_price(fast, _ANY_PRICE * fast.fair_price).layouts()
            for fast in self._fast_points
        )

    @property
    def _fast_points(self) -> tuple[LayoutPoint, ...]:
        """The fastest points between each kind of boundaries."""
        return self.solver.solved.get(self) or self._solve()

    def _front(self, fast: LayoutPoint) -> Sequence[LayoutPoint]:
        """Return the front between the same block boundaries, from their fastest point on."""
        return find_front(
            fast,
            lambda price: self._at_price(fast, price),
            fast.fair_price,
            # Corners between points that are closer than this would mostly be dropped beside them.
            least_saving=5 * _LEAST_SAVING,
        )

    def _at_price(self, fast: LayoutPoint, price: float) -> LayoutPoint:
        """Return the best point of a price between the same block boundaries."""
        return replace(fast, choices=self.solver.choose(fast.problems, price))

    def problem(self, classes: tuple[int, ...], boundary: Boundary | None = None) -> BlockProblem:
        """Return the choice problem of some classes between given block boundaries."""
        return self._problems(classes, (boundary or {},))[0]

    def _problems(
        self, classes: tuple[int, ...], boundaries: Sequence[Boundary]
    ) -> tuple[BlockProblem, ...]:
        solver, size = self.solver, self.microbatch_size
        # Blocks of a class count as often as the model has them, in parts of the most of any class.
        most = max(solver.uses[index] for index in classes)
        return build_block_problems(
            [solver.bound_class(index, size) for index in classes],
            boundaries=boundaries,
            prices=solver.prices_on(self.tp),
            segments=solver.segments(size),
            pins=solver.pins,
            dims={} if solver.usual is None else solver.usual.dims,
            shared=[members for members in solver.shared if members[0][0] in classes],
            weights={index: solver.uses[index] / most for index in classes},
        )

    def _solve(self) -> tuple[LayoutPoint, ...]:
        """Solve the block problems for the least seconds, between each kind of boundaries."""
        solver = self.solver
        boundaries = solver.boundaries(self.tp)
        # (group of classes, boundary) Boundaries share variables: a group is built for all of them.
        groups = [
            self._problems(classes, boundaries)
            for classes in class_groups(solver.graph, solver.shared)
        ]
        return tuple(
            LayoutPoint(uses=solver.uses, problems=problems, choices=solver.choose(problems))
            for problems in zip(*groups, strict=True)
        )


def solve_block(
    problem: BlockProblem,
    bytes_price: float,
    *,
    prefers_ilp: bool = False,
    time_limit_s: float = 5.0,
) -> tuple[Choice, str]:
    """Return the optimum of a block problem, or the best found in time, and which solver found it.

    An integer program and a relaxation may each take the limit. Raises ProfileError where every
    choice takes infinitely long.
    """
    choice, solver = _solve(problem, bytes_price, prefers_ilp, time_limit_s)
    if choice is None or not np.isfinite(choice.cost):
        names = " and ".join(repr(program.name) for _, program in problem.programs)
        raise ProfileError(
            f"no placement of block class {names} on tp={problem.axis_size} takes a finite time "
            "under this profile; see what is wrong with `check_profile`"
        )
    return choice, solver


def _solve(
    problem: BlockProblem, bytes_price: float, prefers_ilp: bool, time_limit_s: float
) -> tuple[Choice | None, str]:
    """Return a choice by the first solver that has one: the exact ones first."""

    def integer_program() -> Choice | None:
        from search.ilp import has_ortools
        from search.ilp.blocks import num_pairs, solve_by_integer_program

        if num_pairs(problem) > _MOST_PAIRS or not has_ortools():
            return None
        return solve_by_integer_program(problem, bytes_price=bytes_price, time_limit_s=time_limit_s)

    if prefers_ilp and (choice := integer_program()) is not None:
        return choice, INTEGER_PROGRAM
    try:
        return solve_by_elimination(problem, bytes_price=bytes_price), ELIMINATION
    except TooWide:
        from search.op_layout.decompose import solve_by_decomposition
    if not prefers_ilp and (choice := integer_program()) is not None:
        return choice, INTEGER_PROGRAM
    choice = solve_by_decomposition(problem, bytes_price=bytes_price, time_limit_s=time_limit_s)
    return choice, "Lagrangian decomposition"
