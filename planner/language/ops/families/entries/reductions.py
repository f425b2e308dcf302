"""Ops that reduce or mix some dims of one tensor and keep the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Op, Ref
from planner.language.layout.placement import OpSharding, Partial, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, normal_dim, normal_dims
from planner.language.ops.kernel import (
    KernelCall,
    Saved,
    saves_indices_of_result,
    saves_nothing,
    saves_result,
)
from planner.language.ops.letters import Letters, by_letters, pointwise, same_dims
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import State
from planner.language.ops.samples.step import Across, Step


def _reduced(call: Call, dims: tuple[int, ...]) -> tuple[Letters, Letters]:
    """Letters of a reduction's input and output; the reduced dims are kept if size one is."""
    rank = len(call.inputs[0])
    keep = len(call.outputs[0]) == rank and bool(rank)
    out = [None if d in dims else d for d in range(rank) if keep or d not in dims]
    return list(range(rank)), out


def sum_or_mean(call: Call) -> Iterator[OpSharding]:
    """A reduced dim may be sharded: each rank then has a term of the sum."""
    dims = normal_dims(call.arg(1, "dim"), len(call.inputs[0]))
    if not call.op.target.endswith((".dim", ".dim_IntList")):
        dims = normal_dims(None, len(call.inputs[0]))
    letters, out = _reduced(call, dims)
    # Sums over ranks are taken of floats alone.
    summed = dims if call.is_floating(call.op.outputs[0]) else ()
    yield from by_letters([letters], [out], summed=summed)
    if summed and call.is_floating(call.op.inputs[0]):
        yield OpSharding(inputs=(P,), outputs=(P,))


def histc(call: Call) -> Iterator[OpSharding]:
    """Numbers of any shape, divided as one likes: counts of the parts add up.

    Only between given bounds; without them (both zero) they are the least and largest entry.
    """
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return
    letters = list(range(len(call.inputs[0])))
    yield from by_letters([letters], [[None]], summed=letters)


def mean_on_shard(placed: Placed) -> LocalForm:
    """The mean of a shard is a term of the whole mean after division by the number of shards."""
    if not (
        isinstance(placed.sharding.inputs[0], Shard)
        and isinstance(placed.sharding.outputs[0], Partial)
    ):
        return LocalForm((placed.op,))
    return scaled_by_shards(placed)


def scaled_by_shards(placed: Placed) -> LocalForm:
    """Run the op on the shard and divide its result by the number of shards."""
    name = placed.op.outputs[0]
    part = f"{name}_of_shard"
    scale = Op(
        name=f"{placed.op.name}_scale",
        target="aten.mul.Tensor",
        args=(Ref(part), 1.0 / placed.call.axis_size),
        outputs=(name,),
        module=placed.op.module,
    )
    meta = placed.call.tensor[name]
    return LocalForm(
        (replace(placed.op, outputs=(part,)), scale),
        (replace(meta, name=part),),
    )


def other_reductions(call: Call) -> Iterator[OpSharding]:
    """Dims that are not reduced can be sharded; all tensors must be whole along the others."""
    if len(call.inputs) != 1:  # max(a, b) works element by element
        if call.op.target.endswith(".other"):
            yield from pointwise(call)
        return
    rank = len(call.inputs[0])
    given = call.arg(2 if call.packet in _DIM_SECOND else 1, "dim")
    dims = normal_dims(given if isinstance(given, int | tuple) else None, rank)
    letters, out = _reduced(call, dims)
    inner = [None if d in dims else d for d in letters]
    yield from by_letters([inner], [out] * len(call.outputs))


_DIM_SECOND = ("aten.norm", "aten.linalg_vector_norm")


def along_dims(call: Call) -> Iterator[OpSharding]:
    """Works along some dims, which stay whole."""
    rank = len(call.inputs[0])
    index = 2 if call.packet == "aten.roll" else 1
    default = -1 if call.packet == "aten.glu" else None
    fixed = normal_dims(call.arg(index, "dims" if index == 2 else "dim", default), rank)
    yield from same_dims(call, fixed=fixed)


def diff(call: Call) -> Iterator[OpSharding]:
    """Differences along one dim, with what is put before and after."""
    rank = len(call.inputs[0])
    fixed = normal_dim(call.arg(2, "dim", -1), rank)
    letters = [None if d == fixed else d for d in range(rank)]
    yield from by_letters([letters] * len(call.inputs), [letters])


def triangle(call: Call) -> Iterator[OpSharding]:
    """Works on the last two dims."""
    rank = len(call.inputs[0])
    yield from same_dims(call, fixed=(rank - 2, rank - 1))
    yield OpSharding(inputs=(P,), outputs=(P,))


def alone_along_dims(call: Call) -> Iterator[OpSharding]:
    """Samples alone: works along one dim, or all."""
    rank = len(call.inputs[0])
    place = 2 if "quantile" in call.packet else 1
    default = -1 if call.packet == "aten.mode" else None
    dims = normal_dims(call.arg(place, "dim", default), rank)
    kept = len(call.outputs[0]) == rank and rank > 0
    letters: Letters = [None if d in dims else d for d in range(rank)]
    out = letters if kept else [d for d in letters if d is not None]
    rest: list[Letters] = [[None] * len(s) for s in call.inputs[1:]]
    yield from by_letters([letters, *rest], [out] * len(call.outputs))


# --------------------------------------------------------------------------- saved for backward


def _input_and_result(call: KernelCall) -> Saved:
    """The gradient goes to the entries that equal the result, or in proportion to it."""
    return Saved(tensors=(*call.op.inputs[:1], *call.op.outputs[:1]))


def _extreme(call: KernelCall) -> Saved:
    """Along a dim the places of the extremes, else the entries that are compared."""
    if len(call.op.outputs) > 1:
        return saves_indices_of_result(call)
    return Saved(tensors=call.op.inputs) if len(call.op.inputs) > 1 else _input_and_result(call)


def sum_of_sum(step: Step) -> tuple[State, ...] | None:
    """Samples' side: linear in a tensor that samples were summed to."""
    state = step.states[0]
    return (state,) if state.sums and len(step.states) == 1 else None


# ---------------------------------------------------------------------------------------- records

_SUM = OpFamily(
    name="mean",
    targets=aten("mean"),
    shard=(ShardRule(sum_or_mean),),
    local_form=mean_on_shard,
    saved=saves_nothing,
    across=Across(algebra="mean", handlers=(sum_of_sum,)),
)
register(_SUM)
register(
    replace(
        _SUM,
        name="sum",
        targets=aten("sum"),
        local_form=None,
        across=Across(algebra="sum", handlers=(sum_of_sum,)),
    )
)
register(
    OpFamily(
        name="counts",
        targets=aten("histc"),
        shard=(ShardRule(histc),),
        across=Across(algebra="sum", counts=True),
    )
)
_REDUCTION = OpFamily(
    name="other reductions",
    targets=aten("argmax argmin any all var var_mean std_mean nansum"),
    shard=(ShardRule(other_reductions),),
)
register(_REDUCTION)
register(
    replace(
        _REDUCTION,
        name="mean of what is a number",
        targets=aten("nanmean"),
        across=Across(algebra="mean"),
    )
)
register(
    replace(
        _REDUCTION,
        name="reductions that save their result",
        targets=aten("amax amin prod std logsumexp norm"),
        saved=_input_and_result,
    )
)
register(replace(_REDUCTION, name="extremes", targets=aten("max min"), saved=_extreme))
register(
    replace(
        _REDUCTION,
        name="reductions that take long",
        targets=aten("linalg_vector_norm"),
        saved=_input_and_result,
        recomputed=False,
    )
)
register(
    replace(
        _REDUCTION,
        name="median",
        targets=aten("median"),
        saved=_extreme,
        recomputed=False,
    )
)
register(
    OpFamily(
        name="reductions without sharding rule",
        targets=aten("aminmax mode nanmedian count_nonzero quantile nanquantile"),
        across=Across(rule=alone_along_dims),
    )
)

_ALONG = OpFamily(
    name="along one dim",
    targets=aten("cumprod logcumsumexp glu"),
    shard=(ShardRule(along_dims),),
)
register(_ALONG)
register(
    replace(
        _ALONG,
        name="softmax",
        targets=aten("softmax _softmax _log_softmax"),
        flop_per_element=5,
        saved=saves_result,
    )
)
register(
    replace(
        _ALONG,
        name="running sum",
        targets=aten("cumsum"),
        saved=saves_nothing,
        across=Across(handlers=(sum_of_sum,)),
    )
)
register(
    replace(
        _ALONG,
        name="running extreme",
        targets=aten("cummax cummin"),
        saved=saves_indices_of_result,
    )
)
register(
    OpFamily(
        name="differences", targets=aten("diff"), shard=(ShardRule(diff),), saved=saves_nothing
    )
)
register(
    OpFamily(
        name="triangle",
        targets=aten("tril triu"),
        shard=(ShardRule(triangle),),
        saved=saves_nothing,
    )
)
