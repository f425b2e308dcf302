"""Attention of a rank's queries without a mask for each pair, by the best kernel there is.

causal, on a GPU            a flash kernel, over the keys up to the last query
other patterns, on a GPU    `flex_attention` with a mask of blocks
all else                    tiles (`attention_tiles`): exact in fp64, and on the CPU
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.runtime.stage.calls.attention_tiles import Sight, attention_by_tiles

_LEAST_FLEX, _MOST_FLEX = 16, 256
"""Sizes of heads that the generated kernels take."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same: Tensor | None,
    keys: Tensor | None,
    scale: float | None,
    sight: Sight,
) -> Tensor:
    """Return attention of queries [b, h, q, d]; arguments as of `attention_by_tiles`."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    is_fused = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    is_plain = sight[:3] == (0, None, None) and same is None and keys is None
    if is_fused and is_plain:
        return causal_by_pieces(query, key, value, scale, sight)
    fits = min(query.shape[-1], value.shape[-1]) >= _LEAST_FLEX and query.shape[-1] <= _MOST_FLEX
    if is_fused and fits:
        return by_blocks(query, key, value, same, keys, scale, sight)
    return attention_by_tiles(query, key, value, same, keys, scale, sight)


def causal_by_pieces(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight
) -> Tensor:
    """Return causal attention, of each piece of the queries to the keys up to its last position.

    The last query is beside the last key, as flash kernels count where there are more keys.
    """
    from torch.nn.attention.bias import causal_lower_right

    grouped = query.shape[1] != key.shape[1]
    count, made = query.shape[-2] // sight.segments, []
    for segment, piece in enumerate(query.split(count, -2)):
        # Behind the piece's last position no key counts, so with keys cut there the last query is
        # beside the last key.
        end = (sight.place(segment, sight.rank) + 1) * count
        mask: Any = causal_lower_right(count, end)
        seen = key[..., :end, :], value[..., :end, :]
        made.append(
            F.scaled_dot_product_attention(
                piece, *seen, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        )
    return made[0] if len(made) == 1 else torch.cat(made, -2)


def by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same: Tensor | None,
    keys: Tensor | None,
    scale: float,
    sight: Sight,
) -> Tensor:
    """Return attention by `flex_attention`, which leaves out blocks of pairs that are not seen."""
    queries, num_keys = query.shape[-2], key.shape[-2]
    # A compiler that compiles what is around takes both as they are.
    is_alone = query.is_cuda and not torch.compiler.is_compiling()
    if is_alone:
        blocks = _shared_blocks(sight, queries, num_keys, query.device, same, keys)
    else:
        blocks = _blocks(sight, queries, num_keys, query.device, same, keys, False)
    made: Tensor = _flex(is_alone)(
        query,
        key,
        value,
        block_mask=blocks,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return made


_MOST_KEPT = 8
"""Masks of blocks that are kept: of kinds of layers, times microbatches whose jobs take turns."""

_kept: OrderedDict[tuple[Any, ...], tuple[Any, Tensor | None, Tensor | None]] = OrderedDict()
"""Those used last, with the tables they follow from."""


def _shared_blocks(
    sight: Sight,
    queries: int,
    num_keys: int,
    device: torch.device,
    same: Tensor | None,
    keys: Tensor | None,
) -> Any:
    """Return a mask of blocks that layers share: all of them where it follows from sizes alone,
    those of a microbatch where it follows from its tables.

    Making it takes a pass over all pairs, and several kernels.
    """
    # Tables with their versions: what is written to one makes another mask. They are held, so that
    # no other tensor gets their ids.
    tables = tuple(None if each is None else (id(each), each._version) for each in (same, keys))
    key = (sight, queries, num_keys, device, *tables)
    if key not in _kept:
        _kept[key] = (_blocks(sight, queries, num_keys, device, same, keys, True), same, keys)
    _kept.move_to_end(key)
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return _kept[key][0]


def _blocks(
    sight: Sight,
    queries: int,
    num_keys: int,
    device: torch.device,
    same: Tensor | None,
    keys: Tensor | None,
    is_compiled: bool,
) -> Any:
    """Return which blocks of pairs are seen; uncompiled it is made of one truth for each pair."""
    from torch.nn.attention.flex_attention import create_block_mask

    low, high, chunk = sight[:3]
    positions = sight.positions(queries, device)

    def sees(batch: Tensor, head: Tensor, place: Tensor, at: Tensor) -> Tensor:
        position = positions[place]
        seen = at >= 0
        if low is not None:
            seen = seen & (position - at >= low)
        if high is not None:
            seen = seen & (position - at <= high)
        if chunk is not None:
            seen = seen & (position // chunk == at // chunk)
        if same is not None:
            seen = seen & (same[batch, position] == same[batch, at])
        if keys is not None:
            seen = seen & keys[batch, at]
        return seen

    # Without tables all samples (and always all heads) see the same: one mask of blocks serves
    # them.
    table = same if keys is None else keys
    samples = None if table is None else table.shape[0]
    return create_block_mask(sees, samples, None, queries, num_keys, device, _compile=is_compiled)


@cache
def _flex(is_compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    return torch.compile(kernel) if is_compiled else kernel
