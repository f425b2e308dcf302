"""The block problem (`op_layout.block_problem`) as an integer program: each op takes a strategy.

With `solver` ilp it places the ops of every block; else of those too wide for elimination. Too
large a program is not worth its time (`num_pairs`).

Variables, all 0 or 1
    x[o, i]        op (or shared parameter) o takes its value i
    z[t, u, p, q]  tensor t is made as p, and its use u requires q
    y[t, p, q]     tensor t is redistributed from p to q, for whoever requires it; t of several uses

Minimise    sum over o, i of x[o, i] * (seconds[o, i] + bytes_price * bytes[o, i])
          + sum over t, p, q of y[t, p, q] * seconds[t, p, q]   (z in place of y: t of one use)

Subject to
    sum over i of x[o, i] = 1                                     one value each
    sum over q of z[t, u, p, q] = S[t, p]                         what is made
    sum over p of z[t, u, p, q] = A[t, u, q]                      what is required
    y[t, p, q] >= z[t, u, p, q]   for every use u                 equal requirements are paid once
with S[t, p] the sum of x over the producer's values that produce p and A[t, u, q] the sum of x over
the values of u that require q. What does not exist (infinite seconds) is held at 0.

Its linear relaxation is solved first (GLOP): a whole optimum of it is that of the program. Pairs
with marginals (the local polytope of a sum of pairwise costs; Werner, A Linear Programming Approach
to Max-Sum Problem, PAMI 2007) make it tight where y >= S + A - 1 is not: the layers of transformers
and all wide blocks met so far (mixtures of experts with latent attention, unrolled state spaces)
had a whole optimum. Where one has not, SCIP branches on x, for so long as it may. GLOP takes 0.04 s
for a layer of Llama, one or two seconds for 20,000 z, and more than ten for 60,000.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.deadline import check_time, left_s
from search.op_layout.block_problem import BlockProblem, Choice, ReshardEdge

# A variable of a linear program's answer is whole, and an answer optimal, to about this.
_NEARLY = 1e-6
# A program is built anew where its largest cost is as many times too large, or too small.
_MOST_OF_SCALE = 10.0


def solve_by_integer_program(
    problem: BlockProblem, *, bytes_price: float = 0.0, time_limit_s: float = 30.0
) -> Choice | None:
    """Return the best choice, or None where there is none or none was found in time.

    Its `gap` is what is not proved of it: 0 unless branching ran out of time.
    """
    for name in ("GLOP", "SCIP"):
        program = _Program.at_price(name, problem, bytes_price)
        check_time()
        status = program.solve(min(time_limit_s, left_s()))
        check_time()
        if status == program.solver.INFEASIBLE:
            return None
        # Branching goes on where the relaxation has no optimum in time: short of that its value is
        # no bound. After branching nothing is left to try.
        is_optimal = status == program.solver.OPTIMAL
        if not is_optimal and (name == "GLOP" or status != program.solver.FEASIBLE):
            continue
        answer = [
            np.array([variable.solution_value() for variable in row]) for row in program.choices
        ]
        if all(row.max() > 1 - _NEARLY for row in answer):
            values = tuple(int(row.argmax()) for row in answer)
            cost = problem.value(values, bytes_price)
            # A whole optimum of the relaxation is the program's: no choice is below the relaxation.
            unproved = 1 - program.solver.Objective().BestBound() / program.scale / max(
                cost, 1e-300
            )
            proved = name == "GLOP" or unproved < _NEARLY
            return Choice(values=values, cost=cost, gap=0.0 if proved else min(1.0, unproved))
    return None


def num_pairs(problem: BlockProblem) -> int:
    """Return about how many z the program has: what its time depends on."""
    return sum(
        len(set(edge.source)) * len(set(requirements))
        for edge in problem.edges
        for _, requirements in edge.uses
    )


@dataclass(kw_only=True)
class _Program:
    """The program being built: OR-tools' solver by name, and its x by variable and value. GLOP
    takes the relaxation, SCIP the program itself.
    """

    name: str
    solver: Any
    scale: float
    """Of costs in the program: solvers' tolerances are absolute, so the largest becomes about 1."""
    choices: list[list[Any]]

    @classmethod
    def at_price(cls, name: str, problem: BlockProblem, bytes_price: float) -> _Program:
        """Return a problem's program at a price of a byte: the latest where only prices differ,
        as building it takes longer than solving it.
        """
        costs = [v.seconds + bytes_price * v.num_bytes for v in problem.variables]
        finite = [c[np.isfinite(c)].max(initial=0.0) for c in costs]
        finite += [e.seconds[np.isfinite(e.seconds)].max(initial=0.0) for e in problem.edges]
        largest = max([*finite, 1e-30])
        program: _Program | None = problem.integer_programs.get(name)
        if program is None or not 1 / _MOST_OF_SCALE < largest * program.scale < _MOST_OF_SCALE:
            program = problem.integer_programs[name] = cls._built(name, problem, 1.0 / largest)
        objective = program.solver.Objective()
        for row, variables in zip(costs, program.choices, strict=True):
            for cost, variable in zip(row.tolist(), variables, strict=True):
                if np.isfinite(cost):
                    objective.SetCoefficient(variable, cost * program.scale)
        return program

    @classmethod
    def _built(cls, name: str, problem: BlockProblem, scale: float) -> _Program:
        """Return a new program, its x without costs."""
        from ortools.linear_solver import pywraplp

        solver = pywraplp.Solver.CreateSolver(name)
        program = cls(name=name, solver=solver, scale=scale, choices=[])
        for variable in problem.variables:
            exists = np.isfinite(variable.seconds).tolist()
            row = [
                program.add(0.0 if is_finite else np.inf, whole=name == "SCIP")
                for is_finite in exists
            ]
            program.choices.append(row)
            program.equal(row, None)
        for edge in problem.edges:
            check_time()
            program.add_edge(edge)
        return program

    def add(self, cost: float, *, whole: bool = False) -> Any:
        """Return a new variable from 0 to 1; 0 where its cost is infinite."""
        finite = bool(np.isfinite(cost))
        make = self.solver.IntVar if whole else self.solver.NumVar
        variable = make(0, 1 if finite else 0, "")
        if finite and cost:
            self.solver.Objective().SetCoefficient(variable, float(cost) * self.scale)
        return variable

    def equal(self, some: Sequence[Any], others: Sequence[Any] | None) -> None:
        """Let one sum equal another, 1 where that is None."""
        total = 1 if others is None else 0
        row = self.solver.Constraint(total, total)
        for variable in some:
            row.SetCoefficient(variable, 1)
        for variable in others or ():
            row.SetCoefficient(variable, -1)

    def add_edge(self, edge: ReshardEdge) -> None:
        """Add what one tensor's redistributions cost."""
        made = self._by_index(edge.producer, edge.source)
        uses = [
            self._by_index(user, requirements) for user, requirements in dict.fromkeys(edge.uses)
        ]
        if not edge.seconds[list(made)].any():
            return
        paid: dict[tuple[int, int], Any] = {}
        for required in uses:
            pairs = {}
            for p in made:
                for q in required:
                    seconds = float(edge.seconds[p, q])
                    # z carries the cost where no other use could share it; infinite ones stay 0.
                    if len(uses) == 1 or not seconds or not np.isfinite(seconds):
                        pairs[p, q] = self.add(seconds)
                        continue
                    pairs[p, q] = self.add(0.0)
                    if (p, q) not in paid:
                        paid[p, q] = self.add(seconds)
                    # y - z >= 0: paid for as soon as any use requires it, and once for all of them.
                    row = self.solver.Constraint(0, 1)
                    row.SetCoefficient(paid[p, q], 1)
                    row.SetCoefficient(pairs[p, q], -1)
            for p, producers in made.items():
                self.equal([pairs[p, q] for q in required], producers)
            for q, requirers in required.items():
                self.equal([pairs[p, q] for p in made], requirers)

    def _by_index(self, variable: int | None, indices: Sequence[int]) -> dict[int, list | None]:
        """Return a variable's x by what they make or require; None where that is given."""
        if variable is None:
            return {indices[0]: None}
        found: dict[int, list | None] = defaultdict(list)
        for value, index in enumerate(indices):
            found[index].append(self.choices[variable][value])  # type: ignore[union-attr]
        return found

    def solve(self, time_limit_s: float) -> int:
        """Solve; return OR-tools' status."""
        self.solver.Objective().SetMinimization()
        self.solver.SetTimeLimit(int(1000 * time_limit_s))
        if self.name == "GLOP":
            # Up to three times as fast here as the primal simplex, and nearer to the optimum.
            self.solver.SetSolverSpecificParametersAsString("use_dual_simplex: true")
        return self.solver.Solve()
