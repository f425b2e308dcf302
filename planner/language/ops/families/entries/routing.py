"""Rows in the order of their experts, and back: one call each, as libraries of layers have them.

    sort_rows      rows [r, h], experts of each row [r, k] (or [r], k = 1), number of experts e,
                   and whether copies of an expert stay in the order they had
                   -> a copy of a row for each of its experts [r k, h], their order [r k], ends [e]
    bias_of_runs   rows [r k, n], biases [e, n], ends [e] -> rows plus the bias of their expert
    stack_of_runs  ends [e], weights of each expert [...] -> all of them [e, ...]; those whose run
                   is empty have no gradient
    unsort_rows    rows [r k, h], their order [r k], their weights [r, k] or none, k
                   -> weighted sums of a row's copies [r, h]

(`moe_permute` and `moe_unpermute` of Transformer Engine; between them are products of runs,
`planner.language.ops.families.products.matmul`.) Captured routing is rewritten into these
(`planner.capture.routing`), and templates are written with them.

Ranks that have a part of the rows each put theirs in order. The whole is then runs of every
rank's own, one rank after the other; in what order rows lie matters to nobody between the first
call and the last. The order and the ends of a rank's runs are about its own rows: they have no
whole, and go with rows that lie as those they were made of (`Own`).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.layout.placement import OpSharding, Own, Replicate, Shard
from planner.language.ops.call import Call, P
from planner.language.ops.families.products.runs_of_rows import (
    ROWS_BY_VALUES,
    ends_of_runs,
    of_runs,
)
from planner.language.ops.kernel import KernelCall, Saved, saves_nothing
from planner.language.ops.record import Numbers, OpFamily, ShardRule, register
from planner.language.ops.samples.state import ADDED, State
from planner.language.ops.samples.step import Across, Step
from planner.units import DTYPE_BYTES

SORT_ROWS = "planner.sort_rows"
BIAS_OF_RUNS = "planner.bias_of_runs"
UNSORT_ROWS = "planner.unsort_rows"
STACK_OF_RUNS = "planner.stack_of_runs"

_ROWS, _WHOLE = Shard(0), Replicate()
_OWN_ORDER, _OWN_ENDS = Own(0), Own()


def sort_rows(call: Call) -> Iterator[OpSharding]:
    """Rows alone; or columns, each with all rows."""
    yield OpSharding(inputs=(_ROWS, _ROWS), outputs=(_ROWS, _OWN_ORDER, _OWN_ENDS))
    yield OpSharding(inputs=(Shard(1), _WHOLE), outputs=(Shard(1), _WHOLE, _WHOLE))


def bias_of_runs(call: Call) -> Iterator[OpSharding]:
    """Rows of each rank's own; columns; or terms of a sum, to which a bias is added once."""
    yield OpSharding(inputs=(_ROWS, _WHOLE, _OWN_ENDS), outputs=(_ROWS,))
    yield OpSharding(inputs=(Shard(1), Shard(1), _WHOLE), outputs=(Shard(1),))
    yield OpSharding(inputs=(P, P, _WHOLE), outputs=(P,))


def stack_of_runs(call: Call) -> Iterator[OpSharding]:
    """Whole weights, where ranks have runs of their own or all; a part of each weight, or terms."""
    each = len(call.inputs) - 1
    yield OpSharding(inputs=(_OWN_ENDS, *(_WHOLE,) * each), outputs=(_WHOLE,))
    for ends in (_WHOLE, _OWN_ENDS):
        yield OpSharding(inputs=(ends, *(P,) * each), outputs=(P,))
    for dim in range(len(call.inputs[1])):
        yield OpSharding(inputs=(_WHOLE, *(Shard(dim),) * each), outputs=(Shard(dim + 1),))


def unsort_rows(call: Call) -> Iterator[OpSharding]:
    """Rows alone; columns, each with all rows; or terms of a sum, of which there are fewer after
    the copies of a row are summed.
    """
    weights = len(call.op.inputs) - 2
    yield OpSharding(inputs=(_ROWS, _OWN_ORDER, *(_ROWS,) * weights), outputs=(_ROWS,))
    for place in (Shard(1), P):
        yield OpSharding(inputs=(place, *(_WHOLE,) * (1 + weights)), outputs=(place,))


def _ends(call: KernelCall) -> Saved:
    """Which run a row is of, where the biases train."""
    _, biases, ends = call.op.inputs
    return Saved(tensors=(ends,) if call.needs_grad(biases) else ())


def _runs_of(call: KernelCall) -> Saved:
    """Which experts have rows."""
    return Saved(tensors=call.op.inputs[:1])


def _for_weights(call: KernelCall) -> Saved:
    """What says where rows were, and each factor of the weighted sum that the other one's gradient
    reads.
    """
    rows, order, *weights = call.op.inputs
    if not weights:
        return Saved(tensors=(order,))
    factors = ((rows, weights[0]), (weights[0], rows))
    return Saved(tensors=(order, *(name for name, other in factors if call.needs_grad(other))))


# ---------------------------------------------------------------------------------------- samples


def _by_expert(step: Step) -> tuple[State, ...] | None:
    """Copies of rows by expert, where before they were, and where each expert's run ends."""
    rows, experts = step.states[:2]
    if rows.rows != Shard(0) or (experts.rows, experts.order) != (rows.rows, rows.order):
        return None
    order, each = step.op.name, step.each(step.op.outputs[1], 0)
    return (
        State(rows=rows.rows, order=order),
        State(rows=rows.rows, order=order, points=rows.order, each=each),
        State(sums=(step.op.name,), share=ADDED),
    )


def _weights_of_runs(step: Step) -> tuple[State, ...] | None:
    """Weights of experts: the ends of their runs tell alone which of them has a gradient."""
    ends, *weights = step.states
    plain = not any(each.rows or each.sums or each.loose or each.lost for each in weights)
    return (weights[0],) if plain and ends.sums else None


def _back_from_experts(step: Step) -> tuple[State, ...] | None:
    """Sums of the copies of a row, in the order that rows had."""
    rows, order, *weights = step.states
    if rows.rows != Shard(0) or (order.rows, order.order) != (rows.rows, rows.order):
        return None
    if order.points is None:
        return None
    if any((each.rows, each.order) != (rows.rows, order.points) for each in weights):
        return None
    return (State(rows=rows.rows, order=order.points),)


# ---------------------------------------------------------------------------------------- numbers


def _experts(call: Call, name: str) -> Numbers:
    return Numbers("any", int(call.arg(2, "number")))


def _ends_alone(call: Call, name: str) -> Numbers:
    """As many rows as experts, whose number the op does not tell."""
    return Numbers("ends", call.shape(name)[0])


def _order(call: Call, name: str) -> Numbers:
    return Numbers("order", call.shape(name)[0])


# ---------------------------------------------------------------------------------------- scratch

_NUMBER = DTYPE_BYTES["int64"]


def _numbers(call: KernelCall, *, forward: bool) -> int:
    """Sorted experts, and the rows that copies are of."""
    rows, order = call.shape(call.op.inputs[0])[0], call.numel(call.op.outputs[1])
    return _NUMBER * order * (forward + (order > rows))


def _runs(call: KernelCall, *, forward: bool) -> int:
    """The run that each row is in."""
    return _NUMBER * call.shape(call.op.inputs[0])[0]


def _copies(call: KernelCall, *, forward: bool) -> int:
    """The copies in the order before, until they are summed; in the backward the products whose
    sums are gradients of weights.
    """
    rows, _, *weights = call.op.inputs
    made = call.element_bytes(call.op.outputs[0])
    if forward:
        return call.numel(rows) * made * (call.numel(rows) > call.numel(call.op.outputs[0]))
    is_weighted = any(call.needs_grad(name) for name in weights)
    # (The gradient of the copies itself is made in the wider dtype, and cast behind.)
    return call.numel(rows) * (2 * made - call.element_bytes(rows)) * is_weighted


register(
    OpFamily(
        name="rows in the order of their experts",
        targets=(SORT_ROWS,),
        numbers=_experts,
        scratch=_numbers,
        shard=(ShardRule(sort_rows),),
        across=Across(handlers=(_by_expert,)),
        saved=saves_nothing,  # its backward needs the order, which `unsort_rows` saves
    )
)
register(
    OpFamily(
        name="weights of experts, of modules of their own",
        targets=(STACK_OF_RUNS,),
        numbers=_ends_alone,
        first_term=1,
        shard=(ShardRule(stack_of_runs),),
        across=Across(handlers=(_weights_of_runs,)),
        saved=_runs_of,
        recomputed=False,
        eager=ROWS_BY_VALUES,
    )
)
register(
    OpFamily(
        name="biases of experts",
        targets=(BIAS_OF_RUNS,),
        numbers=ends_of_runs,
        scratch=_runs,
        shard=(ShardRule(bias_of_runs),),
        across=Across(handlers=(of_runs,)),
        saved=_ends,
        eager=ROWS_BY_VALUES,
    )
)
register(
    OpFamily(
        name="rows back from their experts",
        targets=(UNSORT_ROWS,),
        numbers=_order,
        scratch=_copies,
        shard=(ShardRule(unsort_rows),),
        across=Across(handlers=(_back_from_experts,)),
        saved=_for_weights,
    )
)
