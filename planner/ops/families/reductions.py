"""Ops that reduce or mix some dims of one tensor and keep the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.graph import Op, Ref
from planner.layout.placement import OpSharding, Partial, Shard
from planner.ops.call import Call, P, normal_dim, normal_dims
from planner.ops.letters import Letters, by_letters, same_dims
from planner.ops.registry import LocalForm, Placed, local_form, rule


def _reduced(call: Call, dims: tuple[int, ...]) -> tuple[Letters, Letters]:
    """Letters of a reduction's input and output; the reduced dims are kept if size one is."""
    rank = len(call.inputs[0])
    keep = len(call.outputs[0]) == rank and bool(rank)
    out = [None if d in dims else d for d in range(rank) if keep or d not in dims]
    return list(range(rank)), out


@rule("aten.sum", "aten.mean")
def sum_or_mean(call: Call) -> Iterator[OpSharding]:
    """A reduced dim may be sharded: each rank then has a term of the sum."""
    dims = normal_dims(call.arg(1, "dim"), len(call.inputs[0]))
    if not call.op.target.endswith((".dim", ".dim_IntList")):
        dims = normal_dims(None, len(call.inputs[0]))
    letters, out = _reduced(call, dims)
    summed = dims if call.is_floating(call.op.outputs[0]) else ()
    yield from by_letters([letters], [out], summed=summed)
    if summed and call.is_floating(call.op.inputs[0]):
        yield OpSharding(inputs=(P,), outputs=(P,))


@rule("aten.histc")
def histc(call: Call) -> Iterator[OpSharding]:
    """Numbers of any shape, divided as one likes: counts of the parts add up.

    Only between given bounds; without them (both zero) they are the least and largest entry.
    """
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return
    letters = list(range(len(call.inputs[0])))
    yield from by_letters([letters], [[None]], summed=letters)


@local_form("aten.mean")
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


@rule(
    "aten.amax",
    "aten.amin",
    "aten.max",
    "aten.min",
    "aten.argmax",
    "aten.argmin",
    "aten.any",
    "aten.all",
    "aten.prod",
    "aten.var",
    "aten.var_mean",
    "aten.std",
    "aten.std_mean",
    "aten.logsumexp",
    "aten.norm",
    "aten.linalg_vector_norm",
    "aten.median",
    "aten.nansum",
    "aten.nanmean",
)
def other_reductions(call: Call) -> Iterator[OpSharding]:
    """Dims that are not reduced can be sharded; all tensors must be whole along the others."""
    if len(call.inputs) != 1:  # max(a, b) works element by element
        if call.op.target.endswith(".other"):
            from planner.ops.letters import pointwise

            yield from pointwise(call)
        return
    rank = len(call.inputs[0])
    given = call.arg(2 if call.packet in _DIM_SECOND else 1, "dim")
    dims = normal_dims(given if isinstance(given, int | tuple) else None, rank)
    letters, out = _reduced(call, dims)
    inner = [None if d in dims else d for d in letters]
    yield from by_letters([inner], [out] * len(call.outputs))


_DIM_SECOND = ("aten.norm", "aten.linalg_vector_norm")


@rule(
    "aten.softmax",
    "aten._softmax",
    "aten.log_softmax",
    "aten._log_softmax",
    "aten.softmin",
    "aten.cumsum",
    "aten.cumprod",
    "aten.logcumsumexp",
    "aten.cummax",
    "aten.cummin",
    "aten.flip",
    "aten.roll",
    "aten.glu",
)
def along_dims(call: Call) -> Iterator[OpSharding]:
    """Works along some dims, which stay whole."""
    rank = len(call.inputs[0])
    index = 2 if call.packet == "aten.roll" else 1
    default = -1 if call.packet == "aten.glu" else None
    fixed = normal_dims(call.arg(index, "dims" if index == 2 else "dim", default), rank)
    yield from same_dims(call, fixed=fixed)


@rule("aten.sort", "aten.topk", "aten.argsort", "aten.kthvalue")
def order(call: Call) -> Iterator[OpSharding]:
    """Orders the entries along one dim, which stays whole."""
    index = {"aten.topk": 2, "aten.kthvalue": 2}.get(call.packet, 1)
    dim = call.arg(index, "dim", -1)
    if isinstance(dim, bool):  # sort.stable's second argument is `stable`
        dim = call.arg(2, "dim", -1)
    rank = len(call.inputs[0])
    yield from same_dims(call, fixed=(normal_dim(dim, rank),) if rank else ())


@rule("aten.diff")
def diff(call: Call) -> Iterator[OpSharding]:
    """Differences along one dim, with what is put before and after."""
    rank = len(call.inputs[0])
    fixed = normal_dim(call.arg(2, "dim", -1), rank)
    letters = [None if d == fixed else d for d in range(rank)]
    yield from by_letters([letters] * len(call.inputs), [letters])


@rule("aten.tril", "aten.triu")
def triangle(call: Call) -> Iterator[OpSharding]:
    """Works on the last two dims."""
    rank = len(call.inputs[0])
    yield from same_dims(call, fixed=(rank - 2, rank - 1))
    yield OpSharding(inputs=(P,), outputs=(P,))
