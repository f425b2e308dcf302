"""Block problems too wide for elimination: a good choice, and a bound that says how good.

Bound. Elimination goes on until every table it could make next is too large. Then the variable
that links most is *split*: each table that mentions it by now gets a copy of its own, and
elimination goes on. A variable's own costs c are shared out among its copies,

    sum over j of c_j = c                       value by value

so that the split problem, in which copies may differ, is a relaxation: its optimum is a lower
bound whatever the shares are (Lagrangian decomposition; Guignard and Kim 1987). Subgradient steps
raise it: a value becomes dearer for copies that have chosen it and cheaper for the others,

    c_j[v] += step * ([x_j = v] - part of all copies with x_j = v)

with a part of Polyak's step (what would close the gap if the bound were a plane), halved where the
bound stalls. Small steps keep copies near to what was best without them, and votes with sense.

Choice. Split variables are held at what most of their copies have chosen, and elimination finds
the best of all others; then the best choice so far is improved in the same way, holding whatever
variables make it too wide in an order drawn at random: it never becomes worse (large neighbourhood
search).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod
from random import Random

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time
from search.op_layout.block_problem import BlockProblem, Choice
from search.op_layout.eliminate import problem_tables
from search.op_layout.ordering import Elimination, Ordering, Table, follow_order

# 64 KiB of costs: steps of so many cells take hardly longer than what Python adds to each.
_MOST_CELLS = 8_192
_MOST_EDGE_CELLS = 1_024
# Bounds and choices closer than this, as part of the cost, are taken for equal.
_NEARLY = 1e-6
# A search solves dozens of such problems: a gap of so small a part is left as it is, and only a
# gap that is not small is worth the steps that improve a choice.
_ENOUGH = 1e-3
_WIDE = 1e-2
# So many rounds, or fewer of so many steps of elimination in all: about two seconds of a core.
_MOST_ROUNDS = 40
_MOST_STEPS = 20_000
# Orders drawn at random; each takes as long as a solution.
_MOST_ORDERS = 2
# The part of Polyak's step; it is halved after so many rounds that did not raise the bound.
_FIRST_SLACK = 0.05
_PATIENCE = 2

Floats = NDArray[np.float64]
Scopes = tuple[tuple[int, ...], ...]


def solve_by_decomposition(
    problem: BlockProblem, *, bytes_price: float = 0.0, time_limit_s: float = 5.0
) -> Choice | None:
    """Return a good choice whose `gap` is what its lower bound leaves unproved.

    One round is always finished. None where no choice of finite cost was found; where all costs
    are finite every choice is one.
    """
    began = time.perf_counter()
    tables, sizes = problem_tables(problem, bytes_price, most_edge_cells=_MOST_EDGE_CELLS)
    scopes = tuple(scope for scope, _ in tables)
    num_own = len(problem.variables)
    split = _split(scopes, tuple(sizes))
    # Any shares give a bound; equal ones are where the subgradient steps begin.
    shares = split.fair_shares(tables)
    random = Random(0)
    best: tuple[int, ...] = ()
    cost, bound, slack, stalled = np.inf, -np.inf, _FIRST_SLACK, 0
    for _ in range(min(_MOST_ROUNDS, 1 + _MOST_STEPS // (1 + len(split.order)))):
        check_time()
        chosen, relaxed = split.solve(tables, shares)
        stalled = 0 if relaxed > bound + _NEARLY * abs(bound) else stalled + 1
        # Every relaxation is a bound; steps may overshoot, so the highest so far counts.
        bound = max(bound, relaxed)
        # Two starts: what the relaxation's copies agree on, and the best choice so far.
        voted = split.votes(chosen, num_own)
        ways = [(voted, _order_holding(scopes, tuple(sizes), tuple(split.copies)))]
        if cost - bound > _WIDE * abs(cost) and best:
            drawn = random.randrange(_MOST_ORDERS)
            ways.append((best, _order_holding(scopes, tuple(sizes), (), drawn)))
        for values, (order, held) in ways:
            found = _choose_others(tables, values, order, held)
            found_cost = problem.value(found[:num_own], bytes_price)
            if found_cost < cost:
                own = _order_holding(scopes, tuple(sizes), tuple(range(num_own)))
                best, cost = _choose_others(tables, found, *own), found_cost
        if cost - bound <= _ENOUGH * abs(cost) or time.perf_counter() - began > time_limit_s:
            break
        if stalled > _PATIENCE:
            slack, stalled = slack / 2, 0
        # Polyak's step: as long as would close the gap if the bound were a plane.
        ahead = (cost if np.isfinite(cost) else bound + abs(bound)) - relaxed
        split.move(shares, chosen, slack * ahead)
    if not best:
        return None
    gap = max(0.0, 1.0 - bound / cost) if cost > 0 else 0.0
    return Choice(values=best[:num_own], cost=cost, gap=gap if gap > _NEARLY else 0.0)


@dataclass(frozen=True, kw_only=True)
class _Split:
    """What a split makes of tables: the names of their axes, None where a split variable's own
    costs are shared out, and the steps that eliminate all. The copies' shares follow the tables.
    """

    sizes: tuple[int, ...]
    num_variables: int
    scopes: tuple[tuple[int, ...] | None, ...]
    copies: Mapping[int, tuple[int, ...]]
    order: tuple[Elimination, ...]

    def fair_shares(self, tables: Sequence[Table]) -> dict[int, Floats]:
        """Return the own costs of each split variable in equal shares, a row for each copy."""
        own = {variable: np.zeros(self.sizes[variable]) for variable in self.copies}
        for (scope, table), new in zip(tables, self.scopes, strict=True):
            if new is None:
                own[scope[0]] = own[scope[0]] + table
        return {
            variable: np.tile(own[variable] / len(copies), (len(copies), 1))
            for variable, copies in self.copies.items()
        }

    def solve(
        self, tables: Sequence[Table], shares: Mapping[int, Floats]
    ) -> tuple[tuple[int, ...], float]:
        """Return what all variables, copies too, take in the relaxation, and its optimum."""
        renamed: list[Table] = [
            (tuple(sorted(scope)), table.transpose(np.argsort(scope)))
            for (_, table), scope in zip(tables, self.scopes, strict=True)
            if scope is not None
        ]
        renamed += [
            ((copy,), share)
            for variable, copies in self.copies.items()
            for copy, share in zip(copies, shares[variable], strict=True)
        ]
        return follow_order(self.order, renamed, len(self.sizes))

    def votes(self, chosen: Sequence[int], num_own: int) -> tuple[int, ...]:
        """Return a choice: of split variables what most copies have chosen, and of what is paid
        for, from `num_own` on, whatever one copy pays for.
        """
        voted = list(chosen[: self.num_variables])
        for variable, copies in self.copies.items():
            values = [chosen[copy] for copy in copies]
            most = int(np.bincount(values).argmax())
            # What any copy pays for is paid for, so that no
            # use is left with what it requires unpaid.
            voted[variable] = max(values) if variable >= num_own else most
        return tuple(voted)

    def move(self, shares: Mapping[int, Floats], chosen: Sequence[int], ahead: float) -> None:
        """Change shares along the subgradient, by the step that would raise the bound by `ahead`
        if it were a plane.
        """
        gradients = {}
        for variable, copies in self.copies.items():
            has = np.zeros_like(shares[variable])
            has[np.arange(len(copies)), [chosen[copy] for copy in copies]] = 1.0
            # Columns sum to 0 over the copies, so the shares
            # still add up to the variable's own costs.
            gradients[variable] = has - has.mean(axis=0)
        length = sum(float((gradient**2).sum()) for gradient in gradients.values())
        if length:
            for variable, gradient in gradients.items():
                shares[variable][:] += ahead / length * gradient


@lru_cache(maxsize=16)
def _split(scopes: Scopes, sizes: tuple[int, ...]) -> _Split:
    """Return how to split variables so that no step of elimination is too wide."""
    new_scopes: list[tuple[int, ...] | None] = list(scopes)
    copies: dict[int, tuple[int, ...]] = {}
    ordering = Ordering(scopes, sizes, _most_cells(scopes, sizes))
    while not ordering.run():
        # Splitting what links most loosens the graph most; ties go to the first variable.
        variable = max(ordering.remaining, key=lambda v: (_edges(ordering, v), -v))
        groups = ordering.split(variable)
        for copy, members in groups.items():
            for index in members:
                scope = new_scopes[index] or ()
                new_scopes[index] = tuple(copy if u == variable else u for u in scope)
        # The variable's own costs leave the tables: its copies have them as shares.
        new_scopes = [None if scope == (variable,) else scope for scope in new_scopes]
        copies[variable] = tuple(groups)
    kept = [tuple(sorted(scope)) for scope in new_scopes if scope is not None]
    kept += [(copy,) for group in copies.values() for copy in group]
    return _Split(
        sizes=tuple(ordering.sizes),
        num_variables=len(sizes),
        scopes=tuple(new_scopes),
        copies=copies,
        order=_replayed(ordering, kept),
    )


@lru_cache(maxsize=64)
def _order_holding(
    scopes: Scopes, sizes: tuple[int, ...], held: tuple[int, ...], seed: int | None = None
) -> tuple[tuple[Elimination, ...], frozenset[int]]:
    """Return the steps that eliminate all but variables held, and these.

    Those given are, and all that would make a step too wide; which ones `seed` says.
    """
    random = Random(seed)
    all_held = set(held)
    ordering = Ordering(_without(scopes, all_held), sizes, _most_cells(scopes, sizes))
    while not ordering.run():
        luck = {v: 1.0 if seed is None else random.random() for v in ordering.remaining}
        variable = max(luck, key=lambda v: (luck[v] * _edges(ordering, v), -v))
        ordering.take_out(variable)
        all_held.add(variable)
    return _replayed(ordering, _without(scopes, all_held)), frozenset(all_held)


def _most_cells(scopes: Scopes, sizes: Sequence[int]) -> int:
    """Return how large a table may be: no less than those given, which no split makes smaller."""
    return max(_MOST_CELLS, *(prod(sizes[u] for u in scope) for scope in scopes))


def _edges(ordering: Ordering, variable: int) -> float:
    """Return how much a variable links: the values of its neighbours, as a logarithm."""
    return sum(log2(ordering.sizes[u]) for u in ordering.neighbours[variable])


def _without(scopes: Sequence[tuple[int, ...]], held: Collection[int]) -> list[tuple[int, ...]]:
    return [tuple(u for u in scope if u not in held) for scope in scopes]


def _replayed(ordering: Ordering, scopes: Sequence[tuple[int, ...]]) -> tuple[Elimination, ...]:
    """Return the steps that eliminate the same variables in the same order from these tables."""
    # A limit of 0 cells leaves the heap empty: only the order given is followed.
    again = Ordering(scopes, ordering.sizes, 0)
    for step in ordering.steps:
        again.eliminate(step.variable)
    return tuple(again.steps)


def _choose_others(
    tables: Sequence[Table],
    values: Sequence[int],
    order: Sequence[Elimination],
    held: Collection[int],
) -> tuple[int, ...]:
    """Return the best choice that takes `values` of what is held."""
    sliced: list[Table] = [
        (
            tuple(u for u in scope if u not in held),
            table[tuple(values[u] if u in held else slice(None) for u in scope)],
        )
        for scope, table in tables
    ]
    found, _ = follow_order(order, sliced, len(values))
    return tuple(values[v] if v in held else found[v] for v in range(len(values)))
