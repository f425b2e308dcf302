"""The strategies of an op on a mesh axis, and what runs on each rank under one of them.

Both follow from the shard rules and the local form in the record of the op's family. A strategy
is an `OpSharding` by which the op computes the right thing on local shards. All ops have the
all-replicated one; others are offered where every size divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from planner.errors import LayoutError
from planner.language.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.language.layout.placement import (
    OpSharding,
    Own,
    Partial,
    Placement,
    Replicate,
    Shard,
    parse_placement,
)
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.call import Call, LocalForm, Placed, divides, fits
from planner.language.ops.record import family_of, forgets

MAX_SEGMENT_COUNTS = 3
"""Each count multiplies what a search has to look at; more than these are rare."""

_JOINTS = ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.cat")


def has_rule(target: str) -> bool:
    """Whether an op has a sharding rule; without one it runs replicated."""
    return bool(family_of(target).shard)


def strategies(
    op: Op,
    tensor: Mapping[str, TensorMeta],
    axis_size: int,
    *,
    segments: Iterable[int] = (),
    mirrored: bool = False,
    asked: bool = False,
) -> tuple[OpSharding, ...]:
    """Return every sharding of an op that computes the right thing, all-replicated first.

    `tensor` has whole shapes as numbers. Only shardings whose sizes divide are offered.
    `segments` are the counts of segments to offer beside plain shards, for example those of
    `segment_counts(program)`; `mirrored`, those in even counts are offered so, too. With `asked`
    those of rules are among them that layouts have only where they are asked for.
    """
    return strategies_of(*without_names(op, tensor), axis_size, tuple(segments), mirrored, asked)


def without_names(op: Op, tensor: Mapping[str, TensorMeta]) -> tuple[Op, tuple[TensorMeta, ...]]:
    """Return the op with its tensors numbered, and their metas: equal for ops that are alike."""
    # Equal layers differ in names alone: numbered, their ops share a cache entry.
    number = {name: str(n) for n, name in enumerate(dict.fromkeys((*op.inputs, *op.outputs)))}
    metas = tuple(
        TensorMeta(
            name=number[name],
            shape=meta.shape,
            dtype=meta.dtype,
            kind=meta.kind,
            requires_grad=meta.requires_grad,
        )
        for name, meta in ((name, tensor[name]) for name in number)
    )
    plain = Op(
        name="",
        target=op.target,
        args=map_refs(op.args, lambda ref: Ref(number[ref.name])),
        kwargs=map_refs(op.kwargs, lambda ref: Ref(number[ref.name])),
        outputs=tuple(number[name] for name in op.outputs),
    )
    return plain, metas


@lru_cache(maxsize=65536)
def strategies_of(
    op: Op,
    metas: tuple[TensorMeta, ...],
    axis_size: int,
    segments: tuple[int, ...],
    mirrored: bool = False,
    asked: bool = False,
) -> tuple[OpSharding, ...]:
    """Return the `strategies` of all ops that are alike, given as `without_names` does.

    A model repeats its ops, and a search looks them up often.
    """
    call = Call(op, {meta.name: meta for meta in metas}, axis_size, segments)
    shapes = (*call.inputs, *call.outputs)
    found = {call.replicated(): None}
    rules = (
        rule for rule in family_of(op.target).shard if rule.offered and (asked or not rule.asked)
    )
    for rule in rules if axis_size > 1 else ():
        for sharding in rule.function(call):
            places = (*sharding.inputs, *sharding.outputs)
            if not fits(places, shapes, axis_size):
                continue  # nor does it in segments
            found[sharding] = None
            for count in () if rule.contiguous else segments:
                if fits(places, shapes, axis_size * count):
                    found[_in_segments(sharding, count)] = None
    for sharding in tuple(found) if mirrored and not _sends_mirrored(op) else ():
        if _may_be_mirrored(sharding):
            found[_mirrored(sharding)] = None
    # `local_ops` runs what was offered once, whatever counts of segments were looked at then.
    _proved(op, metas, axis_size).update(found)
    return tuple(found)


@lru_cache(maxsize=4096)
def apart_strategies_of(
    op: Op, metas: tuple[TensorMeta, ...], axis_size: int, segments: tuple[int, ...]
) -> tuple[OpSharding, ...]:
    """As `strategies_of`, but only those whose shards are each computed without the others.

    They say which entries of the outputs follow from which entries of the inputs.
    """
    call = Call(op, {meta.name: meta for meta in metas}, axis_size, segments)
    found: dict[OpSharding, None] = {}
    for rule in family_of(op.target).shard:
        for sharding in () if rule.together else rule.function(call):
            for count in (1,) if rule.contiguous else (1, *segments):
                found[_in_segments(sharding, count)] = None
    shapes = (*call.inputs, *call.outputs)
    return tuple(s for s in found if fits((*s.inputs, *s.outputs), shapes, axis_size))


@lru_cache(maxsize=65536)
def _proved(op: Op, metas: tuple[TensorMeta, ...], axis_size: int) -> set[OpSharding]:
    """Return what `strategies_of` offered so far for such ops, whatever the segments."""
    return set()


forgets(strategies_of.cache_clear)
forgets(apart_strategies_of.cache_clear)
forgets(_proved.cache_clear)


def _in_segments(sharding: OpSharding, count: int) -> OpSharding:
    return OpSharding(
        inputs=tuple(_cut(placement, count) for placement in sharding.inputs),
        outputs=tuple(_cut(placement, count) for placement in sharding.outputs),
    )


def _may_be_mirrored(sharding: OpSharding) -> bool:
    """Whether an op that runs as a sharding also runs with its segments mirrored.

    It does where all tensors that are cut have even counts of segments. Segments that an op splits,
    joins or has several of for each of another tensor's are then whole pairs, of which the second
    is turned round on every tensor alike; and what ranks are called makes no difference to an op
    in segments (those that count positions are told, `piece_in`).
    """
    cuts = [p for p in (*sharding.inputs, *sharding.outputs) if isinstance(p, Shard | Own)]
    return bool(cuts) and all(cut.segments % 2 == 0 for cut in cuts)


def _sends_mirrored(op: Op) -> bool:
    """Whether it moves mirrored pieces over another axis: what it puts side by side is no row of
    pairs of segments.
    """
    ends = op.args[2:4] if op.target == REDISTRIBUTE else ()
    places = (parse_placement(str(end)) for end in ends)
    return any(isinstance(place, Shard | Own) and place.mirrored for place in places)


def _mirrored(sharding: OpSharding) -> OpSharding:
    inputs, outputs = (
        tuple(replace(p, mirrored=True) if isinstance(p, Shard | Own) else p for p in places)
        for places in (sharding.inputs, sharding.outputs)
    )
    return OpSharding(inputs=inputs, outputs=outputs)


@lru_cache(maxsize=1024)
def _cut(placement: Placement, count: int) -> Placement:
    if not isinstance(placement, Shard | Own):
        return placement
    return replace(placement, segments=placement.segments * count)


def local_ops(
    op: Op, sharding: OpSharding, tensor: Mapping[str, TensorMeta], *, axis: str, axis_size: int
) -> LocalForm:
    """Return what runs on each rank for an op under one of its `strategies`.

    Raises LayoutError when the sharding is not one of them.
    """
    placements = (*sharding.inputs, *sharding.outputs)
    if not all(isinstance(p, Replicate) for p in placements):
        like = without_names(op, tensor)
        if sharding not in _proved(*like, axis_size):
            # Not offered yet in this process: a plan from a file names its own counts of segments.
            counts = {p.segments for p in placements if isinstance(p, Shard | Own)}
            segments = tuple(sorted(counts - {1}))
            mirrored = any(isinstance(p, Shard | Own) and p.mirrored for p in placements)
            offered = strategies_of(*like, axis_size, segments, mirrored)
            if sharding not in offered:  # a plan names what it has: that is to ask for it
                strategies_of(*like, axis_size, segments, mirrored, True)
            if sharding not in _proved(*like, axis_size):
                shapes = ", ".join(str(list(tensor[name].shape)) for name in op.inputs)
                raise LayoutError(
                    f"op {op.name} ({op.target} of {shapes}) can't run as {sharding} on "
                    f"{axis}={axis_size}: {_why_not(Call(op, tensor, axis_size), sharding, axis)}; "
                    f"use one of {'; '.join(map(str, offered))}"
                )
        form = family_of(op.target).local_form
        if form is not None:
            return form(Placed(Call(op, tensor, axis_size), sharding, axis))
    return LocalForm((op,))


def _why_not(call: Call, sharding: OpSharding, axis: str) -> str:
    """Say why a sharding is not offered: the size that does not divide, or that none would do."""
    names = (*call.op.inputs, *call.op.outputs)
    placements = (*sharding.inputs, *sharding.outputs)
    if len(names) != len(placements):
        return f"it has {len(call.op.inputs)} inputs and {len(call.op.outputs)} outputs"
    for name, placement in zip(names, placements, strict=True):
        reason = why_not_divided(name, call.shape(name), placement, axis, call.axis_size)
        if reason:
            return reason
    return "on such pieces it would compute something else"


def why_not_divided(
    name: str, shape: tuple[int, ...], placement: Placement, axis: str, axis_size: int
) -> str:
    """Return why a tensor does not split evenly under a placement; empty if it does."""
    if not isinstance(placement, Shard) or divides(placement, shape, axis_size):
        return ""
    if placement.dim >= len(shape):
        return f"{name} of shape {list(shape)} has no dim {placement.dim}"
    size, segments = shape[placement.dim], placement.segments
    fitting = [n for n in range(1, size // segments + 1) if size % (n * segments) == 0]
    cut = f" in {segments} segments" if segments > 1 else ""
    return (
        f"dim {placement.dim} of {name} has size {size}, which {axis}={axis_size} does not "
        f"divide{cut} ({axis} may be {', '.join(map(str, fitting)) or 'nothing'})"
    )


def grad_is_partial(outputs: Iterable[Placement]) -> bool:
    """Whether an op leaves the gradient of its Replicate inputs as a Partial sum."""
    return any(not isinstance(placement, Replicate) for placement in outputs)


def is_linear(op: Op, tensor: Mapping[str, TensorMeta]) -> bool:
    """Whether a sum over ranks passes through an op: terms of the inputs give terms."""
    terms = (Partial(),) * len(terms_of(op))
    # (Whether terms pass through does not depend on how many there are.)
    return any(
        each.inputs[len(op.inputs) - len(terms) :] == terms
        and each.outputs == (Partial(),) * len(op.outputs)
        for each in strategies(op, tensor, 2)
    )


def terms_of(op: Op) -> tuple[str, ...]:
    """Return the inputs that terms of a sum may pass from to a linear op's results."""
    return op.inputs[family_of(op.target).first_term :]


def repeated(program: Program) -> dict[str, Op]:
    """Return the tensors that repeat a smaller one, each with the last op of what makes it.

    Ops in between are linear, of one tensor and dtype, as when the keys of a group are expanded
    to all of its heads.
    """
    # Bytes of the smallest tensor that a tensor follows from by linear ops.
    least: dict[str, int] = {}
    found: dict[str, Op] = {}
    for op in program.ops:
        if len(op.inputs) != 1 or len(op.outputs) != 1:
            continue
        source, made = (program.tensor[name] for name in (*op.inputs, *op.outputs))
        size = least.get(source.name, source.bytes_at(1))
        same_kind = source.dtype == made.dtype
        if size < made.bytes_at(1) and same_kind and is_linear(op, program.tensor):
            found[made.name], least[made.name] = op, size
    return found


def segment_counts(program: Program, handed_on: int = 1) -> tuple[int, ...]:
    """Return the counts of segments worth offering in a bound program.

    Those are the segments in which blocks hand on what the axis cuts (`handed_on`), in each of the
    pieces that another axis makes of a dim; the samples of a batch whose
    leading dims are flattened, as a sequence split needs; and the equal parts into which a
    fused dim is cut, or of which it is joined.
    """
    pieces, flattened, parts = {1}, {1}, {1}
    for op in program.ops:
        call = Call(op, program.tensor, axis_size=1)
        # Joints are cut into equal parts of their own; contiguous rules show where samples were
        # flattened.
        joins = call.packet in _JOINTS
        for rule in family_of(op.target).shard:
            for sharding in rule.function(call) if rule.contiguous or joins else ():
                for place in (*sharding.inputs, *sharding.outputs):
                    if isinstance(place, Shard) and op.target == REDISTRIBUTE:
                        pieces.add(place.segments)
                    elif isinstance(place, Shard) and (joins or place.dim == 0):
                        (parts if joins else flattened).add(place.segments)
    pieces = {piece * handed_on for piece in pieces}
    counts = {piece * samples for piece in pieces for samples in flattened} | parts
    finest = max(pieces)
    # Counts that keep the other axis' pieces apart come first: without them that axis must gather.
    in_order = sorted(counts - {1}, key=lambda count: (count % finest != 0, count))
    return tuple(sorted(in_order[:MAX_SEGMENT_COUNTS]))


def ops_without_rule(program: Program) -> dict[str, int]:
    """Count the ops of a program that always run replicated, by target."""
    counts: dict[str, int] = {}
    for op in program.ops:
        sizes = [program.tensor[name].shape for name in (*op.inputs, *op.outputs)]
        # Making a tensor needs no rule, and there is nothing to divide in numbers.
        if op.inputs and any(sizes) and not has_rule(op.target):
            counts[op.target] = counts.get(op.target, 0) + 1
    return counts
