"""Losses of classes: means over labels that count, and what the sharding rules do not say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner.language.graph import Op, Ref
from planner.language.layout.placement import Shard
from planner.language.ops.samples.state import ADDED, SAMPLES, State
from planner.language.ops.samples.step import MEAN, NONE, Step, in_one_order, numbers_are_values
from planner.units import DTYPE_BYTES

_IGNORED = 4
"""The place of `ignore_index` in all of them."""

_NEVER_NEGATIVE = {
    "argmax", "argmin", "argsort", "bucketize", "one_hot", "randint", "randperm", "searchsorted",
}  # fmt: skip
"""Ops whose whole numbers are places, none of them below zero (`randint`: unless it begins there).
"""
_WITH_PLACES = {"max", "min", "sort", "topk"}
"""Ops whose second result is the places of the first."""

_SAME_LABELS = {
    "alias", "clone", "contiguous", "detach", "flatten", "flip", "permute", "reshape", "roll",
    "squeeze", "t", "to", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Ops that keep each number, in another place."""
_SAME_NUMBERS = {*_SAME_LABELS, "expand", "gather", "index", "index_select", "select", "slice"}
"""Ops whose numbers are among those of the first input."""


def class_loss(step: Step) -> tuple[State, ...] | None:
    """A mean is over the labels that are not ignored, each by the weight of its class.

    On a part of the batch it is one over that part's: its share of the whole is what counts in it,
    if labels and weights are made of the batch alone; else nothing tells it before the step.
    """
    if not step.states[0].rows:
        return None  # of sums, or of weights alone
    of_classes = step.call.is_floating(step.op.inputs[1])
    weight = step.arg(2, "weight")
    is_mean = step.arg(3, "reduction", MEAN) == MEAN
    found = _weighted(step) if isinstance(weight, Ref) or of_classes else step.rules(step)
    if found is None or not is_mean or not found[0].sums or of_classes:
        return found
    counted = [step.states[1]] + ([step.of(weight)] if isinstance(weight, Ref) else [])
    if all(state.pure for state in counted):
        ignored = step.arg(_IGNORED, "ignore_index", -100)
        key = (_root(step, step.op.inputs[1])[0], ignored, weight)
        first = step.walk.counted.setdefault(key, step.op.name)
        return (replace(found[0], share=step.named(first)),)
    if not isinstance(weight, Ref) and _are_all_counted(step):
        return found
    step.blame("normaliser")
    return found


def _weighted(step: Step) -> tuple[State, ...] | None:
    """With class weights or probabilities, of which the sharding rules say nothing."""
    op, call = step.op, step.call
    logits, target = step.states[:2]
    of_classes = call.is_floating(op.inputs[1])
    rank = len(call.inputs[0])
    class_dim = min(1, rank - 1)
    numbers_are_values(step)
    in_one_order(step)
    whole = step.states[2:]
    if not all(s.is_whole for s in whole) or logits.rows is None or target.rows is None:
        return None
    dim = logits.rows.dim
    of_target = dim if of_classes or dim < class_dim else dim - 1
    if dim == class_dim or target.rows != Shard(of_target, logits.rows.segments):
        return None
    reduction = step.arg(3, "reduction", MEAN)
    if reduction == NONE:
        return (State(rows=Shard(dim if dim < class_dim else dim - 1), order=logits.order),)
    return (State(sums=(op.name,), share=SAMPLES if reduction == MEAN else ADDED),)


def _are_all_counted(step: Step) -> bool:
    """Whether labels of the model's own making can't be the ignored one: places of something, where
    the ignored label is negative.
    """
    ignored = step.arg(_IGNORED, "ignore_index", -100)
    name, maker = _root(step, step.op.inputs[1], _SAME_NUMBERS)
    if maker is None or not isinstance(ignored, int) or ignored >= 0:
        return False
    if _packet(maker) == "randint":
        return maker.target.endswith(".default") or maker.args[0] == 0
    if _packet(maker) in _WITH_PLACES:  # (`max` of two tensors has one result: values)
        return name in maker.outputs[1:]
    return _packet(maker) in _NEVER_NEGATIVE


def _root(step: Step, name: str, same: Collection[str] = _SAME_LABELS) -> tuple[str, Op | None]:
    """Return the whole numbers that labels are, in another shape, and the op that made them."""
    maker = step.walk.maker.get(name)
    while maker is not None and _packet(maker) in same:
        source, made = (step.walk.program.tensor[n].dtype for n in (maker.inputs[0], name))
        # (A narrower dtype, or one without a sign, may make another label of the ignored one.)
        if not source.startswith("int") or DTYPE_BYTES.get(made, 0) < DTYPE_BYTES[source]:
            break
        name = maker.inputs[0]
        maker = step.walk.maker.get(name)
    return name, maker


def _packet(op: Op) -> str:
    return op.target.split(".")[1]
