"""The experts of a block on the ranks of ep: each rank has some of them, and gets their rows.

Comes in: a block's program. Goes out: the program that ranks of ep run, and which parameters each
of them has. Read `weights` first (which parameters are experts', and whose), then `spread` (rows go
to the ranks of their experts, and come back) and `gather` (all ranks get all tokens), of which
`rank_program` takes either; `checks` says what does not go together.
"""

from planner.language.lowering.experts.checks import (
    check_experts,
    check_experts_parts,
    check_rows,
    cuts_rows,
    experts_of,
    stacked_matrices,
)
from planner.language.lowering.experts.gather import gathered_layout, is_gathered
from planner.language.lowering.experts.rank_program import spread_experts, spread_params
from planner.language.lowering.experts.weights import (
    expert_params,
    experts_params,
    grouped_products,
    matrix_dims,
    on_experts_mesh,
    params_of_rank,
)

__all__ = [
    "check_experts",
    "check_experts_parts",
    "check_rows",
    "cuts_rows",
    "expert_params",
    "experts_of",
    "experts_params",
    "gathered_layout",
    "grouped_products",
    "is_gathered",
    "matrix_dims",
    "on_experts_mesh",
    "params_of_rank",
    "spread_experts",
    "spread_params",
    "stacked_matrices",
]
