"""Losses of entries and of samples. Summed or averaged, the loss of a part is a term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.language.graph import Ref
from planner.language.layout.placement import OpSharding, Partial, Placement, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, R
from planner.language.ops.families.entries.reductions import scaled_by_shards
from planner.language.ops.families.losses.targets import MEAN, NONE
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.letters import broadcast, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, family_of, register
from planner.language.ops.samples.step import Across


def elementwise_loss(call: Call) -> Iterator[OpSharding]:
    """A loss of each element; summed or averaged, a shard of it is a term."""
    if any(shape != call.inputs[0] for shape in call.inputs):
        return
    reduction = _reduction(call)
    letters = list(range(len(call.inputs[0])))
    out = letters if reduction == NONE else []
    summed = () if reduction == NONE else letters
    yield from by_letters([letters] * len(call.inputs), [out], summed=summed)


def elementwise_loss_on_shard(placed: Placed) -> LocalForm:
    """A mean over a shard is divided by the number of shards, as for `aten.mean`."""
    is_term = isinstance(placed.sharding.outputs[0], Partial)
    if is_term and _reduction(placed.call) == MEAN:
        return scaled_by_shards(placed)
    return LocalForm((placed.op,))


def loss_of_samples(call: Call) -> Iterator[OpSharding]:
    """A loss of each sample in the first dim; summed or averaged, those of a part are a term."""
    is_each = _reduction(call) == NONE
    for dim in range(len(call.inputs[0]) if call.packet == "aten.kl_div" else 1):
        place = Shard(dim)
        given = isinstance(call.arg(4, "weight"), Ref) and call.packet == "aten.multi_margin_loss"
        inputs: list[Placement] = [place for _ in call.inputs]
        if given:
            inputs[-1] = R
        yield OpSharding(inputs=tuple(inputs), outputs=(place if is_each else P,))


def loss_of_entries(call: Call) -> Iterator[OpSharding]:
    """With broadcasting (weights of classes), of which the sharding rule says nothing."""
    whole = max(call.inputs, key=lambda shape: (len(shape), prod(shape)))
    is_each = _reduction(call) == NONE
    letters = range(len(whole))
    inputs = [broadcast(shape, whole) for shape in call.inputs]
    yield from by_letters(inputs, [letters if is_each else []], summed=() if is_each else letters)


def _reduction(call: Call) -> int:
    place = family_of(call.op.target).across.reduction_arg
    assert place is not None  # all records of this file have it
    return int(call.arg(place, "reduction", MEAN))


def _all_inputs(call: KernelCall) -> Saved:
    """Predictions, targets and weights."""
    return Saved(tensors=call.op.inputs)


# ---------------------------------------------------------------------------------------- records

_OF_ENTRIES = OpFamily(
    name="loss of entries",
    targets=aten("mse_loss l1_loss smooth_l1_loss huber_loss"),
    shard=(ShardRule(elementwise_loss),),
    local_form=elementwise_loss_on_shard,
    saved=_all_inputs,
    across=Across(rule=loss_of_entries, reduction_arg=2),
)
register(_OF_ENTRIES)
for _name, _place in (("binary_cross_entropy", 3), ("binary_cross_entropy_with_logits", 4)):
    register(
        replace(
            _OF_ENTRIES,
            name=f"loss of entries: {_name}",
            targets=aten(_name),
            across=Across(rule=loss_of_entries, reduction_arg=_place),
        )
    )

_OF_SAMPLES = {
    2: "kl_div soft_margin_loss multilabel_margin_loss",
    3: "hinge_embedding_loss",
    4: "margin_ranking_loss cosine_embedding_loss",
    5: "poisson_nll_loss multi_margin_loss",
    7: "triplet_margin_loss",
}
"""By the position of their `reduction`."""

for _place, _names in _OF_SAMPLES.items():
    register(
        OpFamily(
            name=f"losses of samples: {_names}",
            targets=aten(_names),
            across=Across(rule=loss_of_samples, reduction_arg=_place),
        )
    )
