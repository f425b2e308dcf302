"""Rows, weights and biases followed: taken in the order of a sort, computed on, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.capture.routing.following import RESHAPED, Following, is_growing, root_of, times
from planner.capture.routing.values import (
    Back,
    Biases,
    Blank,
    Counts,
    InOrder,
    Inverse,
    Known,
    Order,
    Repeated,
    Rows,
    Weighted,
    Weights,
)
from planner.language.graph import Arg, Ref, TensorMeta, bind_arg
from planner.language.layout.placement import Replicate, Shard
from planner.language.ops.record import family_of, mutates, packet_of
from planner.language.ops.registry import apart_strategies_of, without_names

_BATCH = 2
"""Samples of the batch that an op's rows are looked at for: more than one."""


def _taken(at: Following) -> Known | None:
    """Rows, weights or biases by the numbers of an order."""
    source, places = _source_and_places(at)
    if source is None or places is None:
        return None
    if not isinstance(at.of(source), Repeated | None):
        return None  # rows in an order, taken in another
    known, shape = at.of(places), at.shape(source)
    if isinstance(known, InOrder):
        meta = at.tensors[source.name]
        is_table = len(shape) == 2 and not is_growing(meta) and at.of(source) is None
        return Biases(sort=known.sort, of=source.name) if is_table else None
    if not isinstance(known, Order):
        return None
    sort = at.makers[known.sort]
    if at.shape(sort.inputs[0])[0] != times(shape[0], known.divided):
        return None
    if known.divided == 1 and (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        # (Numbers of experts, or of rows, are no weights.)
        if "int" not in at.tensors[source.name].dtype:
            return Weights(sort=known.sort, of=source.name)
        same = root_of(source.name, at.makers, at.tensors, casts=True) == root_of(
            sort.inputs[0], at.makers, at.tensors, casts=True
        )
        return InOrder(sort=known.sort) if same and len(shape) == 1 else None
    return Rows(sort=known.sort) if len(shape) == 2 else None


def _source_and_places(at: Following) -> tuple[Ref | None, Ref | None]:
    """What is taken of, and the numbers of the entries of its first dim that are taken."""
    packet, args = packet_of(at.op.target), at.op.args
    source = args[0]
    assert isinstance(source, Ref)
    if packet == "index":
        indices = args[1]
        places: Arg = indices[0] if isinstance(indices, tuple) and len(indices) == 1 else None
    elif at.dim(1) != 0 or at.op.kwargs:
        return None, None
    else:
        places = args[2] if len(args) > 2 else None
    if not isinstance(places, Ref):
        return None, None
    # `gather` takes entry by entry: whole rows where each number is repeated along the columns.
    is_wide = packet == "gather"
    shape = at.shape(places)
    right = at.shape(source)[1:] == shape[1:] if is_wide else len(shape) == 1
    return (source, places) if right else (None, None)


def _repeated(at: Following) -> Known | None:
    """Each row so often, one after the other."""
    number, source = at.op.args[1], at.op.inputs[0]
    if type(number) is not int or at.arg(2, "dim") != 0 or len(at.shape(source)) != 2:
        return None
    return Repeated(of=source, times=number)


def _expanded_rows(at: Following) -> Known | None:
    """[r, 1, h] as [r, k, h]."""
    source, made = at.shape(at.op.inputs[0]), at.made.shape
    maker = at.makers.get(at.op.inputs[0])
    if len(source) != 3 or len(made) != 3 or source[1] != 1 or type(made[1]) is not int:
        return None
    if maker is None or packet_of(maker.target) != "unsqueeze" or source[::2] != made[::2]:
        return None
    return Repeated(of=maker.inputs[0], times=made[1])


def _reshaped(at: Following) -> Known | None:
    """Weights as a column; copies by row, and back; repeated rows one after the other."""
    known, before, made = at.of(at.op.args[0]), at.shape(at.op.inputs[0]), at.made.shape
    if packet_of(at.op.target) == "detach":
        return None  # (it has no gradient, and what it was made of has)
    if isinstance(known, Weights):
        return known if made[0] == before[0] and set(made[1:]) <= {1} and len(made) < 3 else None
    if isinstance(known, Repeated) and len(before) == 3:
        flat = (times(before[0], known.times), before[2])
        return known if made == flat else None
    if isinstance(known, Back) and known.copies == 1:
        if len(before) == 2 and len(made) == 3 and type(made[1]) is int:
            is_split = before == (times(made[0], made[1]), made[2])
            return replace(known, split=made[1]) if is_split else None
        if len(before) == 3 and made == (times(before[0], known.split), before[2]):
            return replace(known, split=0)
        return known if before == made else None
    return None


def _cast(at: Following) -> Known | None:
    """A cast of weights or of copies is that of what they were before they changed places."""
    known = at.of(at.op.args[0])
    is_same = at.tensors[at.op.inputs[0]].dtype == at.made.dtype
    if isinstance(known, Weights):
        return known if is_same else replace(known, casts=(*known.casts, at.op))
    if isinstance(known, Weighted) and is_same:
        return known
    if isinstance(known, Back) and known.copies == 1:
        if is_same:
            return known
        return replace(known, casts=(*known.casts, at.op)) if known.weights is None else None
    return None


def _multiplied(at: Following) -> Known | None:
    """Rows times their weights, before they are put back or after."""
    if len(at.op.inputs) != 2 or len(at.op.args) != 2:
        return None
    for name, other in (at.op.inputs, at.op.inputs[::-1]):
        known, weights = at.known.get(name), at.known.get(other)
        rows, shape = at.shape(name), at.shape(other)
        is_column = shape == (*rows[:-1], 1)
        if isinstance(known, Rows) and isinstance(weights, Weights):
            same = known.sort == weights.sort and len(rows) == 2 and is_column
            return Weighted(sort=known.sort, rows=name, weights=weights) if same else None
        if not isinstance(known, Back) or known.copies > 1 or known.weights is not None:
            continue
        if weights is None and is_column and "float" in at.tensors[other].dtype:
            return replace(known, weights=Weights(sort=known.sort, of=other))
    return None


def _biased(at: Following) -> Known | None:
    """Rows plus the biases of their experts."""
    if len(at.op.inputs) != 2 or at.arg(2, "alpha", 1) != 1:
        return None
    first, second = (at.known.get(name) for name in at.op.inputs)
    rows, biases = (second, first) if isinstance(first, Biases) else (first, second)
    if not isinstance(rows, Rows) or not isinstance(biases, Biases) or rows.sort != biases.sort:
        return None
    shapes = [at.shape(name) for name in at.op.inputs]
    return rows if shapes[0] == shapes[1] == at.made.shape else None


def _product(at: Following) -> Known | None:
    """Runs of rows, each times its own matrix."""
    if not family_of(at.op.target).deals_rows or len(at.op.inputs) != 3:
        return None
    rows, matrices, ends = (at.known.get(name) for name in at.op.inputs)
    shape = at.shape(at.op.inputs[1])
    if not isinstance(rows, Rows) or matrices is not None or not isinstance(ends, Counts):
        return None
    of_runs = ends.summed and len(shape) == 3 and shape[0] == ends.number
    experts = root_of(at.makers[rows.sort].inputs[0], at.makers, at.tensors, casts=True)
    return rows if of_runs and experts == ends.experts and ends.sort in (None, rows.sort) else None


def _put_back(at: Following) -> Known | None:
    """Rows taken by where each copy is now, or put to where it was."""
    packet = packet_of(at.op.target)
    if packet in ("index", "index_select", "gather"):
        source, inverse_places = _source_and_places(at)
        inverse = at.of(inverse_places)
        return _back(at, source, inverse.sort) if isinstance(inverse, Inverse) else None
    if packet == "index_put":
        indices, values = at.op.args[1], at.op.args[2]
        places: Arg = indices[0] if isinstance(indices, tuple) and len(indices) == 1 else None
        adds = bool(at.arg(3, "accumulate", False))
        is_wide = False
    else:
        if at.dim(1) != 0 or at.op.kwargs or len(at.op.args) != 4:
            return None
        places, values = at.op.args[2], at.op.args[3]
        adds, is_wide = packet in ("index_add", "scatter_add"), "scatter" in packet
    order, blank = at.of(places), at.of(at.op.args[0])
    if not isinstance(order, Order) or not isinstance(blank, Blank) or not isinstance(values, Ref):
        return None
    if at.shape(places) != (at.shape(values) if is_wide else at.shape(values)[:1]):
        return None
    if adds and not blank.zeros:
        return None
    if not adds and order.divided > 1:
        return None  # of a row's copies the last that is put stays
    found = _back(at, values, order.sort)
    made, put = at.made.shape, at.shape(values)
    if found is None or put != (times(made[0], order.divided), *made[1:]):
        return None
    return replace(found, copies=order.divided)


def _back(at: Following, source: Ref | None, sort: str) -> Back | None:
    known = at.of(source)
    if source is None or sort_of_rows(known) != sort or len(at.shape(source)) != 2:
        return None
    if isinstance(known, Weighted):
        return Back(sort=sort, rows=known.rows, weights=known.weights)
    return Back(sort=sort, rows=source.name)


def sort_of_rows(known: Known | None) -> str | None:
    """Return the sort in whose order rows are; None for what is no rows."""
    return known.sort if isinstance(known, Rows | Weighted) else None


def _summed(at: Following) -> Known | None:
    """The copies of a row, summed."""
    known, dims = at.of(at.op.args[0]), at.arg(1, "dim", ())
    dims = (dims,) if type(dims) is int else dims
    if not isinstance(known, Back) or not known.split or len(dims) != 1 or dims[0] not in (1, -2):
        return None
    if at.arg(2, "keepdim", False) or at.arg(3, "dtype") is not None:
        return None
    return replace(known, copies=known.split, split=0)


def by_rows(at: Following) -> Known | None:
    """Whatever an op makes of each row alone is a row, where the order of rows changes nothing."""
    if not at.rows or len(at.sorts) != 1 or mutates(at.op):
        return None
    others = [name for name in at.op.inputs if name not in at.rows]
    if any(name in at.known for name in others):
        return None
    names = dict.fromkeys((*at.op.inputs, *at.op.outputs))
    bound = {name: _bound(at.tensors[name]) for name in names}
    number = bound[at.rows[0]].shape[0]
    assert isinstance(number, int)
    if any(bound[name].shape[:1] != (number,) for name in (*at.rows, *at.op.outputs)):
        return None
    args, kwargs = (bind_arg(each, _BATCH) for each in (at.op.args, at.op.kwargs))
    op = replace(at.op, args=args, kwargs=kwargs)
    inputs = tuple(Shard(0) if name in at.rows else Replicate() for name in at.op.inputs)
    # A piece for each row.
    offered = apart_strategies_of(*without_names(op, bound), number, ())
    alone = any(s.inputs == inputs and set(s.outputs) == {Shard(0)} for s in offered)
    return Rows(sort=next(iter(at.sorts))) if alone else None


def _bound(meta: TensorMeta) -> TensorMeta:
    return replace(meta, shape=meta.shape_at(_BATCH))


ROW_RULES: dict[str, tuple[Callable[[Following], Known | None], ...]] = {
    "index": (_taken, _put_back),
    "index_select": (_taken, _put_back),
    "gather": (_taken, _put_back),
    "repeat_interleave": (_repeated,),
    "expand": (_expanded_rows,),
    "to": (_cast,),
    "_to_copy": (_cast,),
    "mul": (_multiplied,),
    "add": (_biased,),
    "_grouped_mm": (_product,),
    "grouped_mm_fallback": (_product,),
    "index_put": (_put_back,),
    "index_copy": (_put_back,),
    "index_add": (_put_back,),
    "scatter": (_put_back,),
    "scatter_add": (_put_back,),
    "sum": (_summed,),
    **dict.fromkeys(RESHAPED, (_reshaped,)),
}
