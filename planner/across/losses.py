"""Losses of classes with weights or probabilities, of which the sharding rules say nothing."""

from __future__ import annotations

from planner.across.by_rules import in_one_order, numbers_are_values
from planner.across.state import State
from planner.across.step import MEAN, NONE, Step, handles
from planner.graph import Ref
from planner.layout.placement import Shard


@handles("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def _class_loss(step: Step) -> tuple[State, ...] | None:
    """With class weights or probabilities, of which the sharding rules say nothing.

    A mean with class weights is divided by the weights of the targets that the batch has.
    """
    op, call = step.op, step.call
    logits, target = step.states[:2]
    weighted = isinstance(step.arg(2, "weight"), Ref)
    of_classes = call.is_floating(op.inputs[1])
    if not weighted and not of_classes:
        return None
    rank = len(call.inputs[0])
    class_dim = min(1, rank - 1)
    numbers_are_values(step)
    in_one_order(step)
    if any(s.sums or s.power for s in step.states) or logits.rows is None or target.rows is None:
        return None
    dim = logits.rows.dim
    of_target = dim if of_classes or dim < class_dim else dim - 1
    if dim == class_dim or target.rows != Shard(of_target, logits.rows.segments):
        return None
    reduction = step.arg(3, "reduction", MEAN)
    if reduction == NONE:
        return (State(rows=Shard(dim if dim < class_dim else dim - 1), order=logits.order),)
    shares = (op.name,) if reduction == MEAN and weighted and not of_classes else ()
    return (State(sums=(op.name,), shares=shares, power=0 if reduction == MEAN else 1),)
