"""Attention by tiles of scores, each made, used and let go: no tensor has every pair of positions.

    out[q] = sum over k of exp(s[q, k] - lse[q]) v[k]        s: scaled products of queries and keys
    lse[q] = log of the sum over k of exp(s[q, k])           k: the keys that q may look at

Forward goes over the tiles of a row with a running maximum and sum (Milakov and Gimelshein 2018,
arXiv 1805.02867); backward makes each tile again from `lse` (Dao et al. 2022, arXiv 2205.14135,
algorithm 4). Tiles without a pair are left out, on the CPU those between documents too. Exact in
any dtype and on any device, to be held against one process; kernels for GPUs are in
`attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.language.layout.placement import piece_in
from planner.language.ops.attention_pairs import TILE, keys_met


class Sight(NamedTuple):
    """Which keys the queries of a rank may look at; all that a mask would say."""

    low: int | None
    """The least by which a query's position is ahead of a key's; None for any."""
    high: int | None
    """The most."""
    chunk: int | None
    """Both positions are in the same run of so many; None for any."""
    segments: int
    """The queries are a piece of each of so many equal parts of the sequence."""
    ranks: int
    """Pieces of each part."""
    rank: int
    """Which piece of each part, of mirrored ones of every second."""
    of_rank: int | None = None
    """The rank whose pieces the keys are, as queries are this rank's; None: of all positions."""
    mirrored: bool = False
    """Whether parts are dealt to the ranks in turns from the first and from the last (`Shard`)."""

    def place(self, segment: int, rank: int) -> int:
        """Return which piece of the sequence it is that a rank has of a segment."""
        return segment * self.ranks + piece_in(segment, rank, self.ranks, mirrored=self.mirrored)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of so many queries, those of this rank."""
        piece = count // self.segments
        places = [self.place(segment, self.rank) for segment in range(self.segments)]
        starts = torch.tensor(places, device=device) * piece
        return (starts.unsqueeze(-1) + torch.arange(piece, device=device)).flatten()


class _Tile(NamedTuple):
    """A tile of scores."""

    queries: slice
    """Its queries, as the rank counts them."""
    first: int
    """The position of the first of them; the others follow."""
    keys: slice
    """Its keys, as they lie."""
    first_key: int
    """The position of the first of them; the others follow."""

    @property
    def places(self) -> slice:
        """Positions of the queries."""
        return slice(self.first, self.first + self.queries.stop - self.queries.start)

    @property
    def key_places(self) -> slice:
        """Positions of the keys."""
        return slice(self.first_key, self.first_key + self.keys.stop - self.keys.start)


def attention_by_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same: Tensor | None,
    keys: Tensor | None,
    scale: float,
    sight: Sight,
) -> Tensor:
    """Return attention of queries [b, h, q, d] to keys [b, g, k, d] and values [b, g, k, e].

    Each of g heads of keys is that of h / g heads of queries in a row. A query sees a key where
    `sight` says so, `same` [b, k] has the same number at both positions and `keys` [b, k] is true.
    The result of a query that sees none is 0.
    """
    result: Tensor = _Tiles.apply(query, key, value, same, keys, scale, sight)
    return result


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        same: Tensor | None,
        keys: Tensor | None,
        scale: float,
        sight: Sight,
    ) -> Tensor:
        work = Work(query, key, same, keys, scale, sight)
        out = like(query, value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=work.dtype)
        for own, at in work.by_sample(len(query)):
            own.attend(query[at], key[at], value[at], out[at], lse[at])
        # Of a query that sees no key lse is 0, so that the backward makes exp(-inf - 0) = 0.
        lse.masked_fill_(lse == -torch.inf, 0)
        ctx.save_for_backward(query, key, value, same, keys, out, lse)
        ctx.scale, ctx.sight = scale, sight
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, same, keys, out, lse = ctx.saved_tensors
        work = Work(query, key, same, keys, ctx.scale, ctx.sight)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(each, dtype=work.dtype) for each in (key, value))
        for own, at in work.by_sample(len(query)):
            own.slopes(
                tuple(each[at] for each in (query, key, value, out, lse, gradient)),
                partial(own.put, of_query[at]),
                of_key=of_key[at],
                of_value=of_value[at],
            )
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None


class Work:
    """What forward and backward have in common: the tiles, and the scores of each."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        same: Tensor | None,
        keys: Tensor | None,
        scale: float,
        sight: Sight,
    ) -> None:
        # Running sums over many tiles lose too much in half precision.
        half = query.dtype in (torch.bfloat16, torch.float16)
        self.dtype = torch.float32 if half else query.dtype
        self.count, self.num_keys = query.shape[-2], key.shape[-2]
        self.groups = query.shape[1] // key.shape[1]
        self.same, self.keys, self.scale, self.sight = same, keys, scale, sight
        # (A GPU would be waited for, and what is traced or has no values can't be looked at.)
        self._looks = (
            same is not None
            and same.device.type == "cpu"
            and not isinstance(same, FakeTensor)
            and not torch.compiler.is_compiling()
        )

    def by_sample(self, samples: int) -> Iterator[tuple[Work, slice]]:
        """Yield what is left out alike, and for which samples: where tiles between documents are,
        each sample has its own.
        """
        if not self._looks or samples == 1 or self.num_keys <= TILE:
            yield self, slice(None)
            return
        for number in range(samples):
            at = slice(number, number + 1)
            own = copy(self)
            own.same = None if self.same is None else self.same[at]
            own.keys = None if self.keys is None else self.keys[at]
            yield own, at

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
        """Write the result, and the log of each query's sum of exponentials; 0 and -inf of one that
        sees no key.
        """
        for queries, tiles in self.rows():
            rows = self.rows_of(query, queries)
            # Of each query so far: the largest score, and relative to it the sums of exp(score) and
            # of exp(score) * value.
            most = rows.new_full(rows.shape[:-1], -torch.inf)
            total, summed = torch.zeros_like(most), rows.new_zeros(*most.shape, value.shape[-1])
            for tile in self._seen(tiles):
                scores = self.scores(rows, key, tile)
                higher = torch.maximum(most, scores.amax(-1))
                # A query that has seen no key yet: -inf - -inf would be NaN; exp(-inf - 0) is 0, as
                # it must.
                shift = higher.masked_fill(higher == -torch.inf, 0)
                weights = scores.sub_(shift.unsqueeze(-1)).exp_()
                # Earlier sums were relative to a lower maximum: exp(old - new) brings them to
                # the new maximum.
                faded = (most - shift).exp()
                total = total * faded + weights.sum(-1)
                values = value[..., tile.keys, :].to(self.dtype)
                summed = summed * faded.unsqueeze(-1) + weights @ values
                most = higher
                # The next tile is made when this one is gone.
                del scores, higher, shift, weights, faded, values
            # A query that sees no key: 0 / 1.
            total = total.masked_fill(total == 0, 1)
            self.put(out, queries, summed / total.unsqueeze(-1))
            self.put(lse, queries, most + total.log())
            del rows, most, total, summed

    def slopes(
        self,
        of: Sequence[Tensor],
        take: Callable[[slice, Tensor], None],
        *,
        of_key: Tensor,
        of_value: Tensor,
    ) -> None:
        """Give `take` runs of queries with their gradients, by rows; add those of keys and values
        to theirs.

        `of` are queries, keys, values, the result, its log of sums and its gradient: results are of
        all keys that a query sees, whatever part of them is given.
        """
        query, key, value, out, lse, gradient = of
        for queries, tiles in self.rows():
            rows, above = (self.rows_of(each, queries) for each in (query, gradient))
            level = self.rows_of(lse.unsqueeze(-1), queries)
            # w = softmax(s), g = dL/dw: dL/ds = w (g - sum over k of w g). That sum is the dot
            # product of a row's gradient and output, so no row of g is needed whole.
            shared = (above * self.rows_of(out, queries)).sum(-1, keepdim=True)
            of_rows = torch.zeros_like(rows)
            for tile in self._seen(tiles):
                # exp(s - lse) is the softmax itself, so the forward keeps one number a row and no
                # scores.
                weights = self.scores(rows, key, tile).sub_(level).exp_()
                of_value[..., tile.keys, :] += weights.mT @ above
                slopes = above @ value[..., tile.keys, :].to(self.dtype).mT
                # `scale` multiplies the products of queries and keys, so it is a factor of both
                # their gradients.
                slopes.sub_(shared).mul_(weights).mul_(self.scale)
                of_rows += slopes @ key[..., tile.keys, :].to(self.dtype)
                of_key[..., tile.keys, :] += slopes.mT @ rows
                del weights, slopes
            take(queries, of_rows)
            del rows, above, level, shared, of_rows

    def rows(self) -> Iterator[tuple[slice, list[_Tile]]]:
        """Yield runs of queries, with the tiles of the keys that any of them may see."""
        piece = self.count // self.sight.segments
        for segment in range(self.sight.segments):
            # Position in the whole sequence: the rank's piece of this segment.
            first = self.sight.place(segment, self.sight.rank) * piece
            for start in range(0, piece, TILE):
                length = min(TILE, piece - start)
                queries = slice(segment * piece + start, segment * piece + start + length)
                yield queries, self._tiles(queries, first + start, length)

    def _tiles(self, queries: slice, first: int, length: int) -> list[_Tile]:
        low, high, chunk = self.sight[:3]
        ranks, of_rank = self.sight.ranks, self.sight.of_rank
        # Keys of all positions are one run; those of a rank as many as there are segments.
        runs = 1 if of_rank is None else self.sight.segments
        piece = self.num_keys // runs
        total = self.num_keys if of_rank is None else self.num_keys * ranks
        begin, end = keys_met(first, length, total, low=low, high=high, chunk=chunk)
        tiles = []
        for run in range(runs):
            place = 0 if of_rank is None else self.sight.place(run, of_rank) * piece
            for at in range(max(begin, place), min(end, place + piece), TILE):
                stop = min(at + TILE, end, place + piece)
                # From positions to places among the keys at hand.
                moved = run * piece - place
                tiles.append(_Tile(queries, first, slice(at + moved, stop + moved), at))
        return tiles

    def _seen(self, tiles: Sequence[_Tile]) -> Iterator[_Tile]:
        """Yield the tiles but those between other documents, which make zeros.

        Rounds of a ring are left out by sizes alone, on all ranks alike: `rows` has these tiles.
        """
        for tile in tiles:
            if not (self._looks and self._is_between_documents(tile)):
                yield tile

    def _is_between_documents(self, tile: _Tile) -> bool:
        """Whether no query has the number of any key, where documents are numbered in order."""
        assert self.same is not None, "it looks at tables"
        queries, keys = self.same[:, tile.places], self.same[:, tile.key_places]
        apart = (queries.amin(1) > keys.amax(1)) | (queries.amax(1) < keys.amin(1))
        return bool(apart.all())

    def rows_of(self, x: Tensor, queries: slice) -> Tensor:
        """Return some queries of [b, h, q, d] as [b, g, rows, d]: heads of one key as rows."""
        part = x[:, :, queries].to(self.dtype)
        return part.reshape(x.shape[0], x.shape[1] // self.groups, -1, x.shape[-1])

    def put(self, x: Tensor, queries: slice, rows: Tensor) -> None:
        """Put what was computed by rows where the queries are."""
        part = x[:, :, queries]
        part.copy_(rows.reshape(part.shape))

    def scores(self, rows: Tensor, key: Tensor, tile: _Tile) -> Tensor:
        """Return the scores of a tile, -inf where a query may not look at a key."""
        scores = (rows @ key[..., tile.keys, :].to(self.dtype).mT).mul_(self.scale)
        hidden = self._hidden(tile, rows.device)
        if hidden is not None:
            length = tile.queries.stop - tile.queries.start
            shape = (*scores.shape[:2], self.groups, length, scores.shape[-1])
            scores.view(shape).masked_fill_(hidden, -torch.inf)
        return scores

    def _hidden(self, tile: _Tile, device: torch.device) -> Tensor | None:
        """Return where a tile's pairs are not seen, over [b, g, groups, q, k]; None for nowhere."""
        low, high, chunk = self.sight[:3]
        places, key_places = tile.places, tile.key_places
        hidden: Tensor | None = None
        # The least and the largest q - k in the tile. If both are allowed all pairs are, without a
        # mask.
        ahead = tile.first - (key_places.stop - 1), places.stop - 1 - key_places.start
        is_inside = (low is None or ahead[0] >= low) and (high is None or ahead[1] <= high)
        if not is_inside or chunk is not None:
            query = torch.arange(places.start, places.stop, device=device).unsqueeze(-1)
            key = torch.arange(key_places.start, key_places.stop, device=device)
            parts = (
                None if low is None else query - key < low,
                None if high is None else query - key > high,
                None if chunk is None else query // chunk != key // chunk,
            )
            for part in parts:
                hidden = _either(hidden, part)
        if self.same is not None:
            query, key = self.same[:, places].unsqueeze(-1), self.same[:, key_places].unsqueeze(-2)
            hidden = _either(hidden, (query != key)[:, None, None])
        if self.keys is not None:
            hidden = _either(hidden, ~self.keys[:, None, None, None, key_places])
        return hidden


def like(query: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of rows of a width that lies in memory in the query's order of dims,
    as results of fused kernels do.
    """
    strides = query.stride()
    order = sorted(range(query.dim()), key=lambda dim: -strides[dim])
    shape = (*query.shape[:-1], width)
    return torch.empty_permuted(shape, order, dtype=dtype or query.dtype, device=query.device)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
