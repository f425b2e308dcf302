"""Grouped queries on more ranks than there are heads of keys.

Where the ranks of an axis divide the heads of keys, each rank has its queries' own. Where they do
not, as 2 heads of keys on 8 ranks, keys and values are whole on every rank, and it reads those of
its own queries. With H heads of queries, K of keys, n ranks, h = H / n of a rank and g = H / K of a
group:

    rank r has queries   r h ... (r + 1) h - 1, and query i reads key i // g
    g a multiple of h    one head of keys
    h a multiple of g    h / g heads, side by side
    else                 a copy of a head for each of its h queries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.language.graph import Op, Ref, TensorMeta
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, R
from planner.language.ops.families.shapes.views import VIEW
from planner.language.ops.kernel import KernelCall, View, saves_nothing
from planner.language.ops.letters import same_dims
from planner.language.ops.record import ShardRule, register

OWN_KEYS = "planner.own_key_heads"
"""Args (keys or values [..., K, k, d], heads of queries on a rank h, those of a group g, heads that
it makes, axis).
"""


def heads_of_queries(call: Call) -> Iterator[OpSharding]:
    """Yield heads of queries (and of a mask that has them) divided, keys and values whole, on more
    ranks than there are heads of keys.
    """
    query, key = call.inputs[:2]
    heads = len(query) - 3
    if heads >= 0 and 1 < key[heads] < query[heads] and key[heads] % call.axis_size:
        place = Shard(heads)
        masks = (
            place if len(mask) == len(query) and mask[heads] == query[heads] else R
            for mask in call.inputs[3:]
        )
        yield OpSharding(inputs=(place, R, R, *masks), outputs=(place,))


def with_own_keys(placed: Placed, form: Callable[[Placed], LocalForm]) -> LocalForm:
    """Return a local form that reads the keys and values of the rank's own queries, if queries are
    divided by head and keys are not; else the form as it is.
    """
    op, call = placed.op, placed.call
    query, key, value = op.inputs[:3]
    heads = len(call.shape(query)) - 3
    num_keys = call.shape(key)[heads] if heads >= 0 else 1
    if placed.sharding.inputs[:2] != (Shard(heads), R) or num_keys == 1:
        return form(placed)
    ranks, queries = call.axis_size, call.shape(query)[heads]
    local, group = queries // ranks, queries // num_keys
    # h / g heads side by side, or a single head where several ranks share it; else a copy for each
    # query.
    made = max(1, local // group) if local % group == 0 or group % local == 0 else local
    picks: list[Op] = []
    tensors: list[TensorMeta] = []
    for name in dict.fromkeys((key, value)):
        own = f"{name}_of_{op.name}"
        args = (Ref(name), local, group, made, placed.axis)
        picks.append(Op(name=own, target=OWN_KEYS, args=args, outputs=(own,), module=op.module))
        meta = call.tensor[name]
        # Of all ranks together: what a form makes is cut as the result is.
        shape = (*meta.shape[:heads], made * ranks, *meta.shape[heads + 1 :])
        tensors.append(replace(meta, name=own, shape=shape, kind="activation"))
    own_keys = (Ref(f"{name}_of_{op.name}") for name in (key, value))
    attend = replace(op, args=(op.args[0], *own_keys, *op.args[3:]))
    known = {**call.tensor, **{meta.name: meta for meta in tensors}}
    inner = form(replace(placed, call=replace(call, op=attend, tensor=known)))
    return LocalForm((*picks, *inner.ops), (*tensors, *inner.tensors))


def _by_other_dims(call: Call) -> Iterator[OpSharding]:
    """Yield shardings on another axis, of all dims but the heads."""
    yield from same_dims(call, fixed=[len(call.inputs[0]) - 3])
    yield OpSharding(inputs=(P,), outputs=(P,))


def _copies(call: Call | KernelCall) -> bool:
    """Whether each head of queries gets a copy of its head of keys."""
    local, heads = call.arg(1, "queries"), call.arg(3, "heads")
    return bool(local == heads > 1)


def _run_of_heads(call: KernelCall, position: int) -> View | None:
    source = call.op.inputs[0]
    return None if _copies(call) else View(source, call.strides[source])


register(
    replace(
        VIEW,
        name="key heads of a rank's queries",
        targets=(OWN_KEYS,),
        shard=(ShardRule(_by_other_dims),),
        moves_nothing=lambda call: not _copies(call),
        view=_run_of_heads,
        saved=saves_nothing,
    )
)
