"""Attention of a rank's queries whose keys and values go round a ring of ranks.

    out = sum over rounds r of exp(lse_r - lse) out_r        out_r, lse_r: of the keys of a round
    lse = log of the sum over r of exp(lse_r)

In each round a rank attends to the keys and values at hand, those of the rank so many places before
it, while they are on their way to a rank behind (Liu et al. 2023, arXiv 2310.01889). The backward
goes the same way once more. The gradients of a part of keys and values follow it: each rank adds
its own, and the last one sends them home.

    rank 2, rounds 0 1 2        forward   k2    k1    k0
                                backward  k2    k1    k0     gradients of k2 behind, then at home
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.runtime.process import collectives
from planner.runtime.stage.calls.attention_tiles import Sight, like
from planner.runtime.stage.calls.ring_parts import part_kernel


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: int | None,
    high: int | None,
    chunk: int | None,
    scale: float | None,
    enable_gqa: bool,
    same: Tensor | None,
    keys: Tensor | None,
    segments: int,
    rounds: Sequence[int],
    ranks: int,
    group: str,
    mirrored: bool = False,
) -> Tensor:
    """Return attention of one rank's queries [b, h, q, d] to the keys [b, g, q, d] of all ranks.

    A rank has its piece of each of `segments` equal parts of the queries, keys and values, which
    are `mirrored` or not (`layout.placement.Shard`); `same`
    and `keys` [b, ranks * q] are whole. `rounds` are by how many ranks the keys lie behind that
    any rank meets. The rest is as of `local_ops.masked_attention`.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    own = collectives.rank(group)
    sight = Sight(low, high, chunk, segments, ranks, own, mirrored=mirrored)
    result: Tensor = _Ring.apply(query, key, value, same, keys, scale, sight, tuple(rounds), group)
    return result


class _Ring(torch.autograd.Function):
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
        rounds: tuple[int, ...],
        group: str,
    ) -> Tensor:
        kernel = part_kernel(query, key, same, keys, scale, sight)
        out = like(query, value.shape[-1], kernel.dtype).zero_()
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=kernel.dtype)
        passing = _Passing((key, value), rounds, group)
        for behind in rounds:
            part_key, part_value = passing.at_hand
            passing.send()
            of_rank = (sight.rank - behind) % sight.ranks
            if kernel.meets(of_rank):
                lse = _merge(out, lse, *kernel.attend(query, part_key, part_value, of_rank))
            del part_key, part_value
            passing.receive()
        out = out.to(query.dtype)
        # Of a query that sees no key lse is 0, so that the backward makes exp(-inf - 0) = 0.
        lse.masked_fill_(lse == -torch.inf, 0)
        ctx.save_for_backward(query, key, value, same, keys, out, lse)
        ctx.scale, ctx.sight, ctx.rounds, ctx.group = scale, sight, rounds, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, same, keys, out, lse = ctx.saved_tensors
        sight, rounds, group = ctx.sight, ctx.rounds, ctx.group
        kernel = part_kernel(query, key, same, keys, ctx.scale, sight)
        of_query = torch.zeros_like(query, dtype=kernel.dtype)
        passing = _Passing((key, value), rounds, group)
        # Gradients of the part that was at hand before, on their way to where it is now.
        behind_it: collectives.Shift | None = None
        for place, behind in enumerate(rounds):
            part_key, part_value = passing.at_hand
            passing.send()
            of_rank = (sight.rank - behind) % sight.ranks
            grads = [torch.zeros_like(x, dtype=kernel.dtype) for x in (part_key, part_value)]
            if kernel.meets(of_rank):
                part = (query, part_key, part_value, out, lse, gradient)
                kernel.add_gradients(part, of_query, grads, of_rank)
                del part
            del part_key, part_value
            if behind_it is not None:
                _add(grads, collectives.finish_shift(behind_it))
                behind_it = None
            # To where the part is next, or home.
            until = rounds[place + 1] if place + 1 < len(rounds) else sight.ranks
            onward = (until - behind) % sight.ranks
            if onward:
                behind_it = collectives.start_shift(_packed(grads, key.dtype), group, onward)
                grads = []
            passing.receive()
        if behind_it is not None:
            arrived = collectives.finish_shift(behind_it)
            grads = [x.clone() for x in _split(arrived, (key.shape, value.shape))]
        of_key, of_value = (x.to(key.dtype) for x in grads)
        return of_query.to(query.dtype), of_key, of_value, *(None,) * 6


class _Passing:
    """Parts of keys and values that go round: what is at hand in a round. Mutable: it moves on."""

    def __init__(self, own: tuple[Tensor, Tensor], rounds: Sequence[int], group: str) -> None:
        self.at_hand: Sequence[Tensor] = own
        self._shapes, self._group = [x.shape for x in own], group
        self._hops = [after - before for before, after in zip((0, *rounds), rounds, strict=False)]
        self._message: Tensor | None = None
        self._on_its_way: collectives.Shift | None = None
        if self._hops[0]:  # no rank meets its own keys
            self.send()
            self.receive()
        else:
            del self._hops[0]

    def send(self) -> None:
        """Begin to send what is at hand to the rank that has it in the next round, if any."""
        if self._hops:
            # What came is sent on as it came.
            sent = _packed(self.at_hand) if self._message is None else self._message
            self._on_its_way = collectives.start_shift(sent, self._group, self._hops.pop(0))

    def receive(self) -> None:
        """Have the next part at hand, if it was sent."""
        if self._on_its_way is not None:
            self.at_hand, self._message = (), None
            self._message = collectives.finish_shift(self._on_its_way)
            self._on_its_way = None
            self.at_hand = _split(self._message, self._shapes)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Tensor:
    """Add a part's result to the sum so far, in place; return the log of both sums together."""
    both = torch.logaddexp(lse, part_lse)
    # A query that has seen no key: -inf - -inf would be NaN; exp(-inf - 0) is 0, as it must.
    shift = both.masked_fill(both == -torch.inf, 0)
    out.mul_((lse - shift).exp_().unsqueeze(-1))
    out.addcmul_(part, (part_lse - shift).exp_().unsqueeze(-1))
    return both


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return tensors as one message."""
    return torch.cat([x.to(dtype or x.dtype).reshape(-1) for x in tensors])


def _split(message: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = message.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _add(grads: Sequence[Tensor], message: Tensor) -> None:
    for mine, theirs in zip(grads, _split(message, [x.shape for x in grads]), strict=True):
        mine.add_(theirs)
