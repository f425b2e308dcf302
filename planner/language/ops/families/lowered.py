"""What lowering adds to a program: redistributions, and random streams of a rank's own.

With their records a lowered program can be lowered on a second axis. A program lowered on tp has
redistributions over tp between its local tensors. On another axis these are ops like any other:
they treat every dim alike but those they cut or join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm, prod

from planner.language.graph import Arg, Op
from planner.language.layout.placement import (
    OpSharding,
    Own,
    Placement,
    Replicate,
    Shard,
    parse_placement,
)
from planner.language.layout.redistribute import (
    DEAL_RUNS,
    EXCHANGE_ROWS,
    GATHER_ROWS,
    GATHER_SAMPLES,
    OWN_SAMPLES,
    REDISTRIBUTE,
    SCATTER_ROWS,
    collectives,
)
from planner.language.ops.call import Call, LocalForm, P, Placed
from planner.language.ops.families.entries.creation import saves_mask
from planner.language.ops.families.products.runs_of_rows import ROWS_BY_VALUES
from planner.language.ops.kernel import KernelCall, Saved, View, same_memory, saves_nothing
from planner.language.ops.letters import same_dims
from planner.language.ops.record import (
    OWN_RANDOM_STREAM,
    OpFamily,
    ShardRule,
    family_of,
    op_inside,
    register,
)
from planner.language.ops.registry import local_ops, strategies
from planner.language.ops.samples.state import WHOLE, State
from planner.language.ops.samples.step import Across, Step
from planner.language.ops.strides import is_contiguous
from planner.units import DTYPE_BYTES


def redistribute(call: Call) -> Iterator[OpSharding]:
    """Tensor, axis, source, destination, grad_partial: moves data along dims of other axes."""
    places = [parse_placement(str(text)) for text in call.op.args[2:4]]
    if isinstance(places[0], Own):  # ends of runs, which are about rows of each rank's own
        for before in (1, *call.segments):
            for after in _multiples(before, call.segments):
                own = OpSharding(inputs=(Own(segments=before),), outputs=(Own(segments=after),))
                yield own
        return
    yield from same_dims(call, fixed=[p.dim for p in places if isinstance(p, Shard)])
    yield OpSharding(inputs=(P,), outputs=(P,))


def redistribute_in_pieces(call: Call) -> Iterator[OpSharding]:
    """A dim that the other axis cuts can be cut finer: each of its n pieces on its own.

    What is k segments in a piece is k times n in the n pieces side by side. So with tp in
    front a rank of cp has a part of every tp piece, and no position leaves it over cp.
    """
    source, target = (parse_placement(str(text)) for text in call.op.args[2:4])
    (before,), (after,) = call.inputs, call.outputs
    if isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim:
        for count in _multiples(lcm(source.segments, target.segments), call.segments):
            place = Shard(source.dim, count)
            yield OpSharding(inputs=(place,), outputs=(place,))
        return
    for cut in (source, target):
        if isinstance(cut, Shard):
            sizes = before[cut.dim], after[cut.dim]
            for count in _multiples(cut.segments, call.segments):
                # The side that is whole on the other axis has n pieces side by side, and n times
                # the segments.
                ends = [Shard(cut.dim, count * size // min(sizes)) for size in sizes]
                yield OpSharding(inputs=(ends[0],), outputs=(ends[1],))


def _multiples(count: int, segments: Sequence[int]) -> list[int]:
    """Return the counts of segments on offer that keep those of a cut apart."""
    return [count, *(more for more in segments if more != count and more % count == 0)]


def along_samples(call: Call) -> Iterator[OpSharding]:
    """Tensor, axes, dim of samples: joins or cuts that dim over replicas, and keeps others."""
    yield from same_dims(call, fixed=[int(call.op.args[2])])  # type: ignore[arg-type]
    yield OpSharding(inputs=(P,), outputs=(P,))


def own_random_stream(call: Call) -> Iterator[OpSharding]:
    """A random op divided on another axis can be divided as ever on this one, and on a third."""
    inner, axes = _without_axes(call.op)
    if len(axes) > len(_OUTER):
        return
    yield from strategies(inner, call.tensor, call.axis_size, segments=call.segments)[1:]


def own_random_stream_on_shard(placed: Placed) -> LocalForm:
    """What runs on shards of this axis draws numbers of its own on both."""
    op, call = placed.op, placed.call
    if not isinstance(placed.sharding.outputs[0], Shard):
        return LocalForm((op,))
    inner, axes = _without_axes(op)
    form = local_ops(
        inner, placed.sharding, call.tensor, axis=placed.axis, axis_size=call.axis_size
    )
    *before, local = form.ops
    outer = zip(_OUTER, axes, strict=False)
    return LocalForm((*before, replace(local, kwargs=(*local.kwargs, *outer))), form.tensors)


_OUTER = ("outer_group", "outermost_group")
"""What says on which axes beside its own an op draws numbers of a rank's own."""


def _without_axes(op: Op) -> tuple[Op, list[Arg]]:
    """Return a random op as it was before it was divided, and the axes on which it is."""
    inner, told = op_inside(op), dict(op.kwargs)
    axes = [op.args[1], *(told[name] for name in _OUTER if name in told)]
    return replace(inner, kwargs=tuple(kw for kw in op.kwargs if kw[0] not in _OUTER)), axes


# ------------------------------------------------------------------------------------- memory


def _kept_or_sliced(call: KernelCall, position: int) -> View | None:
    """A redistribution that hands its input on, or a contiguous slice of it."""
    source = call.op.inputs[0]
    shape, strides = call.shape(source), call.strides[source]
    src, dst = _ends(call)
    if src == dst or (is_view_slice(src, dst, shape) and is_contiguous(shape, strides)):
        return View(source, strides)
    return None


def is_view_slice(src: Placement, dst: Placement, shape: Sequence[int]) -> bool:
    """Whether a rank's own piece of a contiguous whole of this shape is contiguous too: then it is
    taken without a copy, and keeps the whole's memory.
    """
    return (
        isinstance(src, Replicate)
        and isinstance(dst, Shard)
        and dst.segments == 1
        and prod(shape[: dst.dim]) == 1
    )


def _of_one_replica(call: KernelCall, position: int) -> View | None:
    """Where one replica has all samples, they are what it has."""
    source, made = call.op.inputs[0], call.op.outputs[0]
    return View(source, call.strides[source]) if call.shape(source) == call.shape(made) else None


def _staging_of_samples(call: KernelCall, *, forward: bool) -> int:
    """Rows along another dim than the first are put side by side by a copy."""
    source, made = call.op.inputs[0], call.op.outputs[0]
    is_first = call.op.args[2:4] == (0, 1) or call.shape(source) == call.shape(made)
    return 0 if is_first else call.num_bytes(made)


def _staging(call: KernelCall, *, forward: bool) -> int:
    op = call.op
    src, dst = _ends(call)
    size = max(call.num_bytes(op.inputs[0]), call.num_bytes(op.outputs[0]))
    return staging_bytes(src, dst, size, forward=forward, grad_partial=bool(op.args[4]))


def staging_bytes(
    src: Placement, dst: Placement, num_bytes: int, *, forward: bool, grad_partial: bool = False
) -> int:
    """Bytes in which a collective's pieces are put side by side: collectives cut dim 0, and
    what is cut along another is copied before or after (`planner.runtime.process.collectives`).
    `num_bytes` are those of the larger of what a rank has before and after.
    """
    kind = collectives(src, dst, grad_partial)[0 if forward else 1]
    cuts = [p for p in (src, dst) if isinstance(p, Shard)]
    if kind is None or kind == "all_reduce" or all(p.dim == 0 and p.segments == 1 for p in cuts):
        return 0
    return 2 * num_bytes if kind == "all_to_all" else num_bytes


def _rows_in_other_order(call: KernelCall, *, forward: bool) -> int:
    """Rows of own experts lie in the order in which ranks sent them beside that of experts, on the
    way there and on the way back.
    """
    is_back = bool(call.op.args[3])
    return call.num_bytes(call.op.inputs[0] if is_back else call.op.outputs[0])


def _picked_bytes(call: Call) -> float:
    """The tokens that are picked: as many as copies."""
    return call.tensor[call.op.outputs[0]].bytes_at(1)


def _summed_bytes(call: Call) -> float:
    """Copies, and the sums of all ranks that they are added to."""
    copies, *_, tokens = call.op.inputs
    ranks = call.tensor[tokens].shape_at(1)[0]
    sums = ranks * call.tensor[call.op.outputs[0]].bytes_at(1)
    return call.tensor[copies].bytes_at(1) + sums


_TOKEN = DTYPE_BYTES["int64"]
"""Bytes of the number of the token that a copy is of, where tokens have several."""


def _tokens_of_all(call: KernelCall, *, forward: bool) -> int:
    """The tokens of all ranks, and which of them each copy is; or the sums of their gradients, to
    the end.
    """
    rows, experts = call.op.inputs
    every = int(call.op.args[3]) * call.num_bytes(rows)  # type: ignore[arg-type]
    several = call.numel(experts) > call.shape(rows)[0]
    return every + _TOKEN * call.numel(call.op.outputs[1]) * several * forward


def _sums_of_all(call: KernelCall, *, forward: bool) -> int:
    """Copies times their weights, those of all ranks, and the sums of all tokens, to the end; or
    the gradients of these, and then products whose sums are gradients of weights.
    """
    copies, order, *weights, tokens = call.op.inputs
    ranks, made = call.shape(tokens)[0], call.op.outputs[0]
    every, product = ranks * call.num_bytes(made), 0
    if weights:
        product = call.numel(copies) * call.element_bytes(made)
    if forward:
        return every + product + ranks * sum(map(call.num_bytes, weights))
    every += _TOKEN * call.numel(order) * (call.op.args[4] != 1)
    return max(every, product * any(map(call.needs_grad, weights)))


def _saved_of_sums(call: KernelCall) -> Saved:
    """The order; copies and their weights, each where the other one trains."""
    copies, order, *weights, _ = call.op.inputs
    if not weights:
        return Saved(tensors=(order,))
    kept = (order, copies) if call.needs_grad(weights[0]) else (order,)
    picked = call.numel(order) * call.element_bytes(weights[0]) * call.needs_grad(copies)
    return Saved(tensors=kept, extra_bytes=picked)


def _ends(call: KernelCall) -> tuple[Placement, Placement]:
    src, dst = (parse_placement(str(placement)) for placement in call.op.args[2:4])
    return src, dst


def _saved_inside(call: KernelCall) -> Saved:
    """What the op inside saves. Dropout is not the device's kernel but `planner.runtime.stage.
    own_random`, whose mask is one byte an entry on the CPU, too.
    """
    inner = replace(call, op=op_inside(call.op))
    saved = family_of(inner.op.target).saved
    return saved(replace(inner, device_type="cuda") if saved is saves_mask else inner)


# ---------------------------------------------------------------------------------------- samples


def _the_same_everywhere(step: Step) -> tuple[State, ...]:
    """The same on all replicas."""
    return (WHOLE,)


def _rows_of_its_own(step: Step) -> tuple[State, ...]:
    """Each sample's rows of what was computed on all."""
    (dim,) = step.growing(step.op.outputs[0])
    return (State(rows=Shard(dim)),)


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="redistribution",
        targets=(REDISTRIBUTE,),
        shard=(ShardRule(redistribute), ShardRule(redistribute_in_pieces, contiguous=True)),
        moves_nothing=True,  # its collective is priced apart
        view=_kept_or_sliced,
        saved=saves_nothing,
        scratch=_staging,
        recomputed=False,  # other ranks would have to take part
    )
)
register(
    OpFamily(
        name="samples of all replicas",
        targets=(GATHER_SAMPLES,),
        shard=(ShardRule(along_samples),),
        moves_nothing=True,  # its collective is priced apart
        view=_of_one_replica,
        saved=saves_nothing,
        scratch=_staging_of_samples,
        recomputed=False,  # other ranks would have to take part
        across=Across(handlers=(_the_same_everywhere,)),
    )
)
register(
    OpFamily(
        name="a replica's own samples",
        targets=(OWN_SAMPLES,),
        shard=(ShardRule(along_samples),),
        moves_nothing=True,
        view=same_memory,
        saved=saves_nothing,
        across=Across(handlers=(_rows_of_its_own,)),
    )
)
register(
    OpFamily(
        name="numbers of rows that experts' ranks send each other",
        targets=(DEAL_RUNS,),
        moves_nothing=True,  # its collective is priced apart
        saved=saves_nothing,
        recomputed=False,  # other ranks would have to take part
        eager=ROWS_BY_VALUES,
    )
)
register(
    OpFamily(
        name="exchange of experts' rows",
        targets=(EXCHANGE_ROWS,),
        scratch=_rows_in_other_order,
        saved=saves_nothing,  # what comes back goes the same way
        recomputed=False,  # other ranks would have to take part
        eager=ROWS_BY_VALUES,
    )
)
register(
    OpFamily(
        name="tokens of all ranks, for a rank's experts",
        targets=(GATHER_ROWS,),
        reads=_picked_bytes,
        scratch=_tokens_of_all,
        saved=lambda call: Saved(tensors=call.op.outputs[1:2]),
        recomputed=False,  # other ranks would have to take part
    )
)
register(
    OpFamily(
        name="sums by token, over all ranks",
        targets=(SCATTER_ROWS,),
        reads=_summed_bytes,
        scratch=_sums_of_all,
        saved=_saved_of_sums,
        recomputed=False,  # other ranks would have to take part
    )
)
register(
    OpFamily(
        name="random op with its own stream",
        targets=(OWN_RANDOM_STREAM,),
        shard=(ShardRule(own_random_stream),),
        local_form=own_random_stream_on_shard,
        saved=_saved_inside,
        random=True,
    )
)
register(
    OpFamily(
        name="gradient counted once", targets=("planner.count_gradient_once",), view=same_memory
    )
)
