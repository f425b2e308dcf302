"""Autograd-aware collectives: what ``planner.redistribute`` does at run time.

One mesh axis at a time, the pair (source, destination) of placements fixes what happens
forward, and with it what happens to the gradient. The gradient of a Replicate value is
whole on each rank, of a Shard value it is that shard, of a Partial value it is whole; a
consumer that ran on shards leaves a *partial* gradient on its Replicate input, which
`grad_partial` declares.

    from to     forward            backward
    R    R      -                  all_reduce when grad_partial     (Megatron's f)
    P    R      all_reduce         all_reduce when grad_partial     (else Megatron's g)
    P    S(d)   reduce_scatter     all_gather
    S(d) R      all_gather         slice, or reduce_scatter when grad_partial
    R    S(d)   slice              all_gather
    S(a) S(b)   all_to_all         all_to_all
    R    P      keep on rank 0     -
    S(d) P      pad with zeros     slice

Groups are passed by name: that is what functional collectives take, so the same code
runs eagerly, under `torch.compile` and on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from planner.errors import LayoutError
from planner.language.layout.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    has_way,
    parse_placement,
    piece_in,
)
from planner.timeline import BESIDE, COLLECTIVE, ROWS

_funcol = torch.ops._c10d_functional

_Recording = Callable[[str, str, int, str, int], AbstractContextManager[object]]

_span: _Recording | None = None
"""What records a collective while it runs, or what runs beside it: its kind of span, its name, the
rows that it brings, its group and the bytes of the whole tensor; None: nobody looks."""

Meanwhile = Callable[[], None]
"""Work that is done between the start of a collective and the wait for it."""

_meanwhile: Meanwhile | None = None
"""That of the collective that comes next; None: it has none."""

Step = tuple[str, int | Shard, int | Shard]
"""A step: (kind, where, where to); an int stands for a plain Shard of that dim. Only an
all-to-all has a second place, where it splits; `run_step` says what the kinds do."""

_NOTHING: Step = ("identity", 0, 0)


def record(span: _Recording | None) -> None:
    """Record this process's collectives from now on, each under its kind or its name, with the rows
    that it brings to experts, and what runs beside them; None: no longer.
    """
    global _span
    _span = span


def run(
    kind: str,
    start: Callable[[], Tensor],
    *,
    group: str = "",
    sent: Tensor | None = None,
    times: int = 1,
    rows: int = 0,
    meanwhile: Meanwhile | None = None,
) -> Tensor:
    """Start a collective of a group and return what it gives, which the caller may use at once.

    What is to be done `meanwhile`, by the caller's word or by that of the redistribution it is of,
    is done before the wait. For records: the whole tensor is so many `times` as large as what is
    `sent`, and `rows` come to experts.
    """
    global _meanwhile
    if torch.compiler.is_compiling():
        return _funcol.wait_tensor(start())
    meanwhile, _meanwhile = meanwhile or _meanwhile, None
    if _span is None:
        given = start()
        if meanwhile is not None:
            meanwhile()
        return _funcol.wait_tensor(given)
    with _span(COLLECTIVE, kind, rows, group, _bytes(sent, times)):
        given = start()
        if meanwhile is not None:
            with _span(BESIDE, "weight gradients", 0, "", 0):
                meanwhile()
        return _funcol.wait_tensor(given)


def gather_each(parts: Sequence[Tensor], group: str, use: Callable[[int, Tensor], None]) -> None:
    """Gather parts one behind another, and use each, [ranks * rows, ...], while the next is under
    way.
    """
    ranks = size(group)

    def start(at: int) -> Tensor:
        return _funcol.all_gather_into_tensor(parts[at].contiguous(), ranks, group)

    with _spanning(COLLECTIVE, "all_gather", group, sum(_bytes(x, ranks) for x in parts)):
        under_way = start(0)
        for at in range(len(parts)):
            gathered = _funcol.wait_tensor(under_way)
            if at + 1 < len(parts):
                under_way = start(at + 1)
            with _spanning(BESIDE, "products"):
                use(at, gathered)


def scatter_each(make: Callable[[int], Tensor], count: int, group: str) -> list[Tensor]:
    """Make so many tensors, [ranks * rows, ...], and sum and scatter each while the next ones are
    made; return this rank's rows of each.
    """
    ranks, under_way = size(group), []
    # (How many bytes is not known before they are made.)
    with _spanning(COLLECTIVE, "reduce_scatter", group):
        for at in range(count):
            with _spanning(BESIDE, "products"):
                made = make(at).contiguous()
            under_way.append(_funcol.reduce_scatter_tensor(made, "sum", ranks, group))
        return [_funcol.wait_tensor(each) for each in under_way]


def _spanning(
    kind: str, name: str, group: str = "", num_bytes: int = 0
) -> AbstractContextManager[object]:
    return nullcontext() if _span is None else _span(kind, name, 0, group, num_bytes)


def _bytes(sent: Tensor | None, times: int = 1) -> int:
    return 0 if sent is None else sent.numel() * sent.element_size() * times


def redistribute(
    x: Tensor,
    group: str,
    src: str,
    dst: str,
    grad_partial: bool,
    *,
    meanwhile: Meanwhile | None = None,
    made: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Change the placement of `x` on one axis from `src` to `dst` (``R``, ``P``, ``S(dim)``).

    An empty `group` is an axis of size one: nothing moves. `meanwhile` is work that the backward
    does while its collective is under way; `made` does the forward's in another way. Raises
    LayoutError for a pair of placements without a way between them.
    """
    if not group:
        return x
    forward, backward = _steps(parse_placement(src), parse_placement(dst), grad_partial)
    if forward is _NOTHING and backward is _NOTHING:
        return x
    return _Redistribute.apply(x, group, forward, backward, meanwhile, made)


def check_way(src: str, dst: str) -> None:
    """Raise LayoutError where `redistribute` would."""
    _steps(parse_placement(src), parse_placement(dst), False)


def _steps(src: Placement, dst: Placement, grad_partial: bool) -> tuple[Step, Step]:
    match src, dst:
        # `grad_partial`: each rank used the value for a part of the work, and has a term of its
        # gradient.
        case (Replicate(), Replicate()):
            return _NOTHING, ("all_reduce", 0, 0) if grad_partial else _NOTHING
        case (Partial(), Partial()):
            return _NOTHING, _NOTHING
        case (Partial(), Replicate()):
            return ("all_reduce", 0, 0), ("all_reduce", 0, 0) if grad_partial else _NOTHING
        # y = sum of x_r: the gradient of every term is that of y, so ranks gather it.
        case (Partial(), Shard()):
            return ("reduce_scatter", dst, 0), ("all_gather", dst, 0)
        case (Shard(), Replicate()):
            back = "reduce_scatter" if grad_partial else "slice"
            return ("all_gather", src, 0), (back, src, 0)
        case (Replicate(), Shard()):
            return ("slice", dst, 0), ("all_gather", dst, 0)
        case (Shard(), Shard()):
            if src == dst:
                return _NOTHING, _NOTHING
            return ("all_to_all", src, dst), ("all_to_all", dst, src)
        # Summed over ranks, x on the first and zeros elsewhere is x.
        case (Replicate(), Partial()):
            return ("keep_first", 0, 0), _NOTHING
        case (Shard(), Partial()):
            return ("pad", src, 0), ("slice", src, 0)
    if not has_way(src, dst):
        raise LayoutError(
            f"no way from placement {src} to {dst}: each rank has a value of its own (O), of which "
            "there is no whole; give the op that makes it and those that take it one layout, or "
            "search again"
        )
    raise LayoutError(f"no way from placement {src} to {dst}; go by R, the whole tensor")


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: str,
        forward: Step,
        backward: Step,
        meanwhile: Meanwhile | None,
        made: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.group, ctx.step, ctx.meanwhile = group, backward, meanwhile
        return run_step(x, group, forward) if made is None else made(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        global _meanwhile
        if ctx.meanwhile is not None:
            _meanwhile = ctx.meanwhile
        return run_step(grad, ctx.group, ctx.step), None, None, None, None, None


def run_step(x: Tensor, group: str, step: Step) -> Tensor:
    """Run one step on `x`, without autograd."""
    kind, first, second = step
    if isinstance(first, Shard) or isinstance(second, Shard):
        return _run_at_shards(x, group, kind, _as_shard(first), _as_shard(second))
    dim, other = first, second
    match kind:
        case "identity":
            return x.view_as(x)
        case "all_reduce":
            return run(
                kind,
                lambda: _funcol.all_reduce(x.contiguous(), "sum", group),
                group=group,
                sent=x,
            )
        case "all_gather":
            return _all_gather(x, group, dim)
        case "reduce_scatter":
            return _reduce_scatter(x, group, dim)
        case "all_to_all":
            return _all_to_all(x, group, gather_dim=dim, split_dim=other)
        case "slice":
            return _own_piece(x, group, dim).contiguous()
        case "pad":
            # Summed over ranks, each piece surrounded by zeros is the whole.
            whole = x.new_zeros(
                [s * (size(group) if d == dim else 1) for d, s in enumerate(x.shape)]
            )
            _own_piece(whole, group, dim).copy_(x)
            return whole
        case "keep_first":
            return x.clone() if rank(group) == 0 else torch.zeros_like(x)
    raise AssertionError(kind)


def _group(name: str) -> ProcessGroup:
    return _resolve_process_group(cast(Any, name))


def _as_shard(where: int | Shard) -> Shard:
    return where if isinstance(where, Shard) else Shard(where)


def _run_at_shards(x: Tensor, group: str, kind: str, first: Shard, second: Shard) -> Tensor:
    """Run a step on pieces of segments: the step itself, one dim further in."""
    places = [first, second] if kind == "all_to_all" else [first]
    if all(place.segments == 1 for place in places):
        return run_step(x, group, (kind, first.dim, second.dim))
    # Pieces of other segments of the same dim lie interleaved: gathered, then cut again.
    if kind == "all_to_all" and first.dim == second.dim:
        whole = run_step(x, group, ("all_gather", first, 0))
        return run_step(whole, group, ("slice", second, 0))
    if any(place.mirrored for place in places):
        return _run_at_mirrored(x, group, kind, first, second)
    # [..., segments * n, ...] as [..., segments, n, ...]: each segment is then cut as a plain dim.
    by_dim = sorted(places, key=lambda place: place.dim)
    for place in reversed(by_dim):
        x = x.unflatten(place.dim, (place.segments, -1))
    # (Compilers can't look a placement up in a list.)
    inner = [place.dim + 1 + sum(p.dim < place.dim for p in places) for place in places]
    y = run_step(x, group, (kind, inner[0], inner[-1]))
    for place in by_dim:
        y = y.flatten(place.dim, place.dim + 1)
    return y


def _run_at_mirrored(x: Tensor, group: str, kind: str, first: Shard, second: Shard) -> Tensor:
    """Run a step on pieces of mirrored segments: they are no plain dim, so each is put in its place
    by itself, in the copy that puts pieces side by side in any case.
    """
    dim, own = first.dim, rank(group)
    match kind:
        case "all_gather":
            gathered = _all_gather(x, group, 0).chunk(size(group))
            return torch.cat(_in_order(gathered, first), dim)
        case "reduce_scatter":
            # Along dim 0, which the collective scatters, what goes to each rank.
            by_rank = _by_rank(x, first, size(group))
            mine = _reduce_scatter(torch.cat([p for pieces in by_rank for p in pieces]), group, 0)
            return mine if dim == 0 else torch.cat(mine.chunk(first.segments), dim)
        case "slice":
            return torch.cat(_by_rank(x, first, size(group))[own], dim)
        case "pad":
            shape = [s * (size(group) if d == dim else 1) for d, s in enumerate(x.shape)]
            whole = x.new_zeros(shape)
            places = _by_rank(whole, first, size(group))[own]
            for place, piece in zip(places, x.chunk(first.segments, dim), strict=True):
                place.copy_(piece)
            return whole
        case "all_to_all":
            # Each rank's pieces side by side are a piece of a plain dim.
            plain = [Shard(p.dim) if p.mirrored else p for p in (first, second)]
            if second.mirrored:
                by_rank = _by_rank(x, second, size(group))
                x = torch.cat([p for pieces in by_rank for p in pieces], second.dim)
            y = _run_at_shards(x, group, kind, *plain)
            if first.mirrored:
                y = torch.cat(_in_order(y.chunk(size(group), dim), first), dim)
            return y
    raise AssertionError(kind)


def _by_rank(whole: Tensor, place: Shard, ranks: int) -> list[list[Tensor]]:
    """Return views of the pieces that each rank has of a whole, by segment."""
    _check_divides(whole, place.dim, ranks * place.segments)
    pieces = whole.chunk(ranks * place.segments, place.dim)
    return [
        [
            pieces[segment * ranks + piece_in(segment, rank, ranks, mirrored=place.mirrored)]
            for segment in range(place.segments)
        ]
        for rank in range(ranks)
    ]


def _in_order(by_rank: Sequence[Tensor], place: Shard) -> list[Tensor]:
    """Return views of pieces of a whole in their order, of what each rank has."""
    pieces, ranks = [part.chunk(place.segments, place.dim) for part in by_rank], len(by_rank)
    return [
        pieces[piece_in(segment, at, ranks, mirrored=place.mirrored)][segment]
        for segment in range(place.segments)
        for at in range(ranks)
    ]


# A group keeps its size and ranks, so a compiled graph may hold them as constants.
@torch.compiler.assume_constant_result
def size(group: str) -> int:
    """Return the number of ranks of a group given by name; one for the empty name."""
    return _group(group).size() if group else 1


@torch.compiler.assume_constant_result
def rank(group: str) -> int:
    """Return this process's rank in a group given by name; zero for the empty name."""
    return _group(group).rank() if group else 0


def _check_divides(x: Tensor, dim: int, parts: int) -> None:
    if x.shape[dim] % parts:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by {parts} "
            "ranks; use a degree that divides it"
        )


def _own_piece(x: Tensor, group: str, dim: int) -> Tensor:
    parts = size(group)
    _check_divides(x, dim, parts)
    piece = x.shape[dim] // parts
    return x.narrow(dim, rank(group) * piece, piece)


def _all_gather(x: Tensor, group: str, dim: int) -> Tensor:
    parts = size(group)
    x = x.contiguous()
    gathered = run(
        "all_gather",
        lambda: _funcol.all_gather_into_tensor(x, parts, group),
        group=group,
        sent=x,
        times=parts,
    )
    # The collective stacks along dim 0; elsewhere the pieces must be put side by side.
    return gathered if dim == 0 else torch.cat(gathered.chunk(parts), dim)


def _reduce_scatter(x: Tensor, group: str, dim: int) -> Tensor:
    parts = size(group)
    _check_divides(x, dim, parts)
    # The collective scatters dim 0, so the pieces of the wanted dim are stacked there.
    stacked = x if dim == 0 else torch.cat(x.chunk(parts, dim))
    stacked = stacked.contiguous()
    return run(
        "reduce_scatter",
        lambda: _funcol.reduce_scatter_tensor(stacked, "sum", parts, group),
        group=group,
        sent=stacked,
    )


def _all_to_all(x: Tensor, group: str, *, gather_dim: int, split_dim: int) -> Tensor:
    parts = size(group)
    _check_divides(x, split_dim, parts)
    # Part r of the split dim goes to rank r; what comes back is put together along the other dim.
    stacked = torch.stack(x.chunk(parts, split_dim))
    ones = [1] * parts
    received = run(
        "all_to_all",
        lambda: _funcol.all_to_all_single(stacked, ones, ones, group),
        group=group,
        sent=stacked,
    )
    return torch.cat(received.unbind(0), gather_dim)


def all_to_all_parts(x: Tensor, group: str, parts: int) -> Tensor:
    """Give each rank its part of dim 0; return the parts that ranks gave this one, in order."""
    stacked = x.unflatten(0, (parts, -1)).contiguous()
    ones = [1] * parts
    received = run(
        "all_to_all",
        lambda: _funcol.all_to_all_single(stacked, ones, ones, group),
        group=group,
        sent=stacked,
    )
    return received.flatten(0, 1)


def all_to_all_rows(
    x: Tensor, group: str, sent: list[int], got: list[int], *, to_experts: bool = False
) -> Tensor:
    """Give each rank its stretch of the rows; return the stretches that ranks gave this one.

    `sent` and `got` are how many rows go to, and come from, each rank of the group, in order. Those
    that go `to_experts` are recorded as such.
    """
    if not group:
        return x
    kind, rows = (ROWS, sum(got)) if to_experts else ("all_to_all", 0)
    return run(
        kind, lambda: _funcol.all_to_all_single(x, got, sent, group), group=group, sent=x, rows=rows
    )


def all_gather_rows(x: Tensor, group: str, *, to_experts: int | None = None) -> Tensor:
    """Return the rows of all ranks, which have as many. So many copies of them are recorded as
    brought `to_experts` of this rank.
    """
    x, parts = x.contiguous(), size(group)
    kind = "all_gather" if to_experts is None else ROWS
    return run(
        kind,
        lambda: _funcol.all_gather_into_tensor(x, parts, group),
        group=group,
        sent=x,
        times=parts,
        rows=to_experts or 0,
    )


class Shift(NamedTuple):
    """A message that is on its way round a group."""

    sent: Tensor
    """What this rank sends; its memory is read until the message is there."""
    arrives: Tensor
    """What comes from the rank as far back; to be read after `finish_shift`."""
    group: str
    """The group."""


def start_shift(x: Tensor, group: str, by: int) -> Shift:
    """Begin to send a tensor of one dim `by` ranks on, round the group. All ranks send as much."""
    parts, own = size(group), rank(group)
    sent, got = [0] * parts, [0] * parts
    sent[(own + by) % parts] = got[(own - by) % parts] = len(x)
    # Nothing goes to other ranks: backends send no empty messages.
    return Shift(x, _funcol.all_to_all_single(x, got, sent, group), group)


def finish_shift(shift: Shift) -> Tensor:
    """Wait for what the rank as far back has sent, and return it."""
    return run("all_to_all", lambda: shift.arrives, group=shift.group, sent=shift.sent)


def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """Return the largest of the ranks' numbers, element by element; at least one dim."""
    return run(
        "all_reduce",
        lambda: _funcol.all_reduce(torch.atleast_1d(x), "max", group),
        group=group,
        sent=x,
    )
