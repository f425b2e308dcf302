"""The block problem as another integer program, for OR-tools' CP-SAT: an independent solver.

Its relaxation is weak: a layer of Llama takes seconds, `search.ilp.blocks` 0.04 s.

Variables (all 0 or 1)
    x[o, i]     op (or shared parameter) o takes its value i
    y[t, p, q]  tensor t is redistributed from placement p to requirement q

Minimise    sum over o, i of x[o, i] * seconds[o, i]
          + sum over t, p, q of y[t, p, q] * seconds[t, p, q]
          + bytes_price * sum over o, i of x[o, i] * bytes[o, i]

Subject to
    sum over i of x[o, i] = 1                                       one value each
    y[t, p, q] >= S[t, p] + A[t, u, q] - 1   for every use u of t    a use that requires q of a
                                                                    tensor made as p pays once,
                                                                    however many require the same
    sum over o, i of x[o, i] * bytes[o, i] <= memory_limit_bytes
with S[t, p] the sum of x over the producer's values that produce p and A[t, u, q] the sum of x over
the values of u that require q. A redistribution that does not exist forbids its y.

CP-SAT takes whole numbers: seconds are scaled to about 1e9 steps of the largest cost at hand,
so the optimum is exact to a few parts in 1e9 of it; the objective reported is recomputed from
the original numbers.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from search.ilp.joint import solve_model
from search.op_layout.block_problem import BlockProblem, Choice

_STEPS = 10**9


def solve_by_cpsat(
    problem: BlockProblem,
    *,
    bytes_price: float = 0.0,
    memory_limit_bytes: float | None = None,
    time_limit_s: float = 30.0,
) -> Choice | None:
    """Return the optimum, or None when the memory limit admits none.

    Raises RuntimeError when time runs out before a proof.
    """
    from ortools.sat.python import cp_model

    costs = [v.seconds + bytes_price * v.num_bytes for v in problem.variables]
    finite = [c[np.isfinite(c)].max(initial=0.0) for c in costs]
    finite += [ln.seconds[np.isfinite(ln.seconds)].max(initial=0.0) for ln in problem.edges]
    scale = _STEPS / max([*finite, 1e-30])
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in v.values] for v in problem.variables]
    objective: list = []
    for row, cost in zip(x, costs, strict=True):
        model.add_exactly_one(row)
        for literal, seconds in zip(row, cost, strict=True):
            if np.isfinite(seconds):
                objective.append(round(seconds * scale) * literal)
            else:
                model.add(literal == 0)
    for edge in problem.edges:
        source = defaultdict(list)
        for value, row_index in enumerate(edge.source):
            source[row_index].append(1 if edge.producer is None else x[edge.producer][value])
        required = [
            _by_column(requirements, None if u is None else x[u]) for u, requirements in edge.uses
        ]
        for p, q in np.argwhere(edge.seconds > 0):
            made = source.get(int(p), [])
            wants = [use[int(q)] for use in required if int(q) in use]
            if not made or not wants:
                continue
            link_s = float(edge.seconds[p, q])
            y = model.new_bool_var("")
            if np.isfinite(link_s):
                objective.append(round(link_s * scale) * y)
            else:
                model.add(y == 0)
            for literals in wants:
                model.add(y >= sum(made) + sum(literals) - 1)
    if memory_limit_bytes is not None:
        terms = [
            round(size) * literal
            for row, v in zip(x, problem.variables, strict=True)
            for literal, size in zip(row, v.num_bytes, strict=True)
        ]
        model.add(sum(terms) <= int(memory_limit_bytes))
    model.minimize(sum(objective))
    found = solve_model(model, time_limit_s)
    if found is not None and not found[1]:
        raise RuntimeError(f"no proof after {time_limit_s:g} s")
    solver = None if found is None else found[0]
    if solver is None:
        return None
    values = tuple(next(i for i, b in enumerate(row) if solver.boolean_value(b)) for row in x)
    return Choice(values=values, cost=problem.value(values, bytes_price))


def _by_column(requirements: tuple[int, ...], row: list | None) -> dict[int, list]:
    """Return for each column the literals that require it; 1 where the placement is given."""
    result: dict[int, list] = defaultdict(list)
    for value, column in enumerate(requirements):
        result[column].append(1 if row is None else row[value])
    return result
