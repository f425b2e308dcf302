"""Attention of queries to the keys of one rank, which is a part of what they see.

Beside its result a part gives the log of each query's sum of exponentials, by which parts are put
together. In the backward it is given that of all parts, and the whole result.

    half precision on a GPU, causal or without a mask     flash kernels, a call for each piece
    all else                                              tiles (`attention_tiles`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.runtime.stage.calls.attention_tiles import Sight, Work, like

_WIDTH = 8
"""Flash kernels take heads whose width is a multiple of this."""


class PartKernel(Protocol):
    """Attention of a rank's queries to the pieces of a rank."""

    dtype: torch.dtype
    """Of sums over parts."""

    def meets(self, of_rank: int) -> bool:
        """Whether any query sees a key of a rank."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, of_rank: int
    ) -> tuple[Tensor, Tensor]:
        """Return the result [b, h, q, e], and logs of sums of exponentials [b, h, q]."""
        ...

    def add_gradients(
        self,
        of: Sequence[Tensor],
        of_query: Tensor,
        of_keys: Sequence[Tensor],
        of_rank: int,
    ) -> None:
        """Add the gradients of queries, keys and values to theirs; `of` is as in `Work.slopes`."""
        ...


def part_kernel(
    query: Tensor,
    key: Tensor,
    same: Tensor | None,
    keys: Tensor | None,
    scale: float,
    sight: Sight,
) -> PartKernel:
    """Return what computes a part."""
    is_plain = sight[:3] in ((0, None, None), (None, None, None)) and same is None and keys is None
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and is_plain:
        return FlashParts(scale, sight)
    return TileParts(query, key, same, keys, scale, sight)


class TileParts:
    """By tiles of scores."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        same: Tensor | None,
        keys: Tensor | None,
        scale: float,
        sight: Sight,
    ) -> None:
        def work(of_rank: int) -> Work:
            return Work(query, key, same, keys, scale, sight._replace(of_rank=of_rank))

        self._work = work
        self.dtype = work(sight.rank).dtype

    def meets(self, of_rank: int) -> bool:
        """As in `PartKernel`."""
        return any(tiles for _, tiles in self._work(of_rank).rows())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, of_rank: int
    ) -> tuple[Tensor, Tensor]:
        """As in `PartKernel`."""
        out = like(query, value.shape[-1], self.dtype)
        lse = query.new_empty(query.shape[:-1], dtype=self.dtype)
        self._work(of_rank).attend(query, key, value, out, lse)
        return out, lse

    def add_gradients(
        self,
        of: Sequence[Tensor],
        of_query: Tensor,
        of_keys: Sequence[Tensor],
        of_rank: int,
    ) -> None:
        """As in `PartKernel`."""

        def add(queries: slice, rows: Tensor) -> None:
            place = of_query[:, :, queries]
            place.add_(rows.reshape(place.shape))

        of_key, of_value = of_keys
        self._work(of_rank).slopes(of, add, of_key=of_key, of_value=of_value)


class _Seen(NamedTuple):
    """A run of queries and a run of keys, all pairs of which are seen; or, causal, as long a run of
    keys at the same positions.
    """

    queries: slice
    keys: slice
    causal: bool


class FlashParts:
    """By flash kernels, of queries and keys whose pieces lie wholly before, at or behind others."""

    dtype = torch.float32
    forward: Any = torch.ops.aten._scaled_dot_product_flash_attention
    backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward

    def __init__(self, scale: float, sight: Sight) -> None:
        self._scale, self._sight = scale, sight

    def _runs(self, of_rank: int, piece: int) -> Iterator[_Seen]:
        segments, rank = self._sight.segments, self._sight.rank
        if self._sight.low is None:
            yield _Seen(slice(0, segments * piece), slice(0, segments * piece), False)
            return
        for segment in range(segments):
            queries = slice(segment * piece, (segment + 1) * piece)
            # Of its own segment a rank sees the pieces before its own.
            own, other = (self._sight.place(segment, each) for each in (rank, of_rank))
            before = segment + (other < own)
            if before:
                yield _Seen(queries, slice(0, before * piece), False)
            if of_rank == rank:
                yield _Seen(queries, queries, True)

    def meets(self, of_rank: int) -> bool:
        """As in `PartKernel`."""
        return any(self._runs(of_rank, 1))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, of_rank: int
    ) -> tuple[Tensor, Tensor]:
        """As in `PartKernel`."""
        out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=self.dtype)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=self.dtype)
        for seen in self._runs(of_rank, query.shape[-2] // self._sight.segments):
            taken = (query[:, :, seen.queries], key[:, :, seen.keys], value[:, :, seen.keys])
            made, level, *_ = self.forward(
                *map(_padded, taken), 0.0, seen.causal, scale=self._scale
            )
            place = slice(None), slice(None), seen.queries
            # Of one run of queries there are two calls at most: keys before it, and its own.
            both = torch.logaddexp(lse[place], level)
            out[place] *= (lse[place] - both).exp().unsqueeze(-1)
            out[place] += made[..., : value.shape[-1]] * (level - both).exp().unsqueeze(-1)
            lse[place] = both
        return out, lse

    def add_gradients(
        self,
        of: Sequence[Tensor],
        of_query: Tensor,
        of_keys: Sequence[Tensor],
        of_rank: int,
    ) -> None:
        """As in `PartKernel`."""
        query, key, value, out, lse, gradient = of
        for seen in self._runs(of_rank, query.shape[-2] // self._sight.segments):
            rows, columns = ((slice(None), slice(None), run) for run in (seen.queries, seen.keys))
            taken = (gradient[rows], query[rows], key[columns], value[columns], out[rows])
            # Nothing is dropped, so no state of random numbers is read.
            none = torch.empty(0, dtype=torch.uint64, device=query.device)
            lengths = None, None, taken[1].shape[-2], taken[2].shape[-2]
            sums = lse[rows].contiguous()
            random = 0.0, seen.causal, none, none
            grads = self.backward(*map(_padded, taken), sums, *lengths, *random, scale=self._scale)
            for total, place, grad in zip(
                (of_query, *of_keys), (rows, columns, columns), grads, strict=True
            ):
                total[place] += grad[..., : total.shape[-1]]


def _padded(x: Tensor) -> Tensor:
    """Fill heads up with zeros, which change neither scores nor results."""
    return F.pad(x, (0, -x.shape[-1] % _WIDTH)) if x.shape[-1] % _WIDTH else x
