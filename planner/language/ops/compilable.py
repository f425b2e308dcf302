"""Which programs of blocks can be compiled as a graph of fixed sizes; free of torch.

The runtime leaves the others eager (`planner.runtime.stage.compiled`), and the cost model prices
them so.
"""

from __future__ import annotations

from planner.language.graph import Program
from planner.language.ops.families.products.rings import RING
from planner.language.ops.record import is_random, op_inside

_BY_VALUES = "how many rows experts get follows from their values"

EAGER_OPS = {
    "planner.autograd_function": "it calls an autograd function of the model's own",
    "planner.opaque_module": "it calls a module as it is",
    "planner.table_lookup": "the gradient of its table is of rows",
    "planner.exchanged_embedding": "which rows ranks exchange follows from the batch",
    "planner.deal_runs": _BY_VALUES,
    "planner.exchange_rows": _BY_VALUES,
    "planner.product_of_runs": _BY_VALUES,
    "planner.bias_of_runs": _BY_VALUES,
    "planner.stack_of_runs": _BY_VALUES,
    RING: "its messages run beside its kernels",
}
"""Ops that no such graph holds, and why."""


def why_eager(program: Program) -> str | None:
    """Return why a lowered program runs op by op in any case, as a clause; None: it need not."""
    for op in program.ops:
        reason = EAGER_OPS.get(op.target) or EAGER_OPS.get(op.target.removesuffix(".default"))
        if reason is not None:
            return reason
        inside = op_inside(op)
        if inside is not op and is_random(inside) and "attention" in inside.target:
            # In a graph it would be the plain formula, which saves all scores.
            return "its attention drops numbers of this rank's own"
    return None
