"""Every choice of placements in a tiny block, one after the other: the referee of `eliminate`."""

from __future__ import annotations

from itertools import product

from search.op_layout.block_problem import BlockProblem


def best_by_brute_force(problem: BlockProblem, bytes_price: float = 0.0) -> tuple[float, list[int]]:
    """Return the optimum by trying every combination."""
    sizes = [range(len(v.values)) for v in problem.variables]
    return min(
        ((problem.value(choice, bytes_price), list(choice)) for choice in product(*sizes)),
        key=lambda pair: pair[0],
    )
