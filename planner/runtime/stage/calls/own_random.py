"""Random ops on shards: each rank draws numbers of its own, where replicas draw equal ones.

The seed of a draw comes from the CPU's default generator, which the ranks of a group
advance in step; so it is new on each call, and the same again when a recompute restores
that generator. Ops that run on replicas are not disturbed.

Dropout is made of an operator of ours that draws, which a compiler takes as it is, and plain
arithmetic. Attention keeps its fused kernel, whose numbers come from the default generator,
forked for it; as a compiler can't follow that, compiled attention with dropout is the
plain formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.runtime.process import collectives
from planner.runtime.process.device import forked_generators

# The negative limit of SELU, to which alpha dropout sets what it drops.
_ALPHA = 1.7580993408473766


def with_own_random_stream(
    target: str,
    group: str,
    *args: Any,
    outer_group: str = "",
    outermost_group: str = "",
    **kwargs: Any,
) -> Any:
    """Run the ATen op `target` with random numbers that differ on each rank of the group.

    With an `outer_group` and an `outermost_group` (of other mesh axes) they differ on each rank of
    all.
    """
    stream = stream_of(group, outer_group, outermost_group)
    match target.split(".")[1]:
        case "dropout":
            return _dropout(stream, *args, **kwargs)
        case "native_dropout":
            return _native_dropout(stream, *args, **kwargs)
        case "feature_dropout":
            return _feature_dropout(stream, *args, **kwargs)
        case "alpha_dropout":
            return _alpha_dropout(stream, *args, **kwargs)
        case "scaled_dot_product_attention":
            return own_attention(stream, *args, **kwargs)
    raise AssertionError(target)


def stream_of(*groups: str) -> int:
    """Return this rank's number among the ranks of all groups, which names its stream."""
    number, ranks = 0, 1
    for group in groups:
        number += ranks * collectives.rank(group)
        ranks *= collectives.size(group)
    return number


def own_attention(
    stream: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose dropout is this stream's; other arguments as PyTorch's."""
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if torch.compiler.is_compiling():
        return _plain_attention(
            stream, query, key, value, attn_mask, dropout_p, is_causal, **settings
        )
    with _disable_current_modes():  # on fake tensors the seed is a real number all the same
        seed = int(_seed()) + stream
    with forked_generators(query.device):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **settings
        )


@torch.library.custom_op(
    "planner::own_uniform",
    mutates_args=(),
    schema="(Tensor like, Tensor seed, int stream) -> Tensor",
)
def own_uniform(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Draw fp32 numbers of [0, 1) in the shape of `like`, different for each stream.

    The numbers follow from the seed, which an operator drew that compilers know to be
    random: two draws are not merged, nor is one repeated with another seed in the backward.
    """
    generator = torch.Generator(like.device)
    generator.manual_seed(int(seed) + stream)
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)


@own_uniform.register_fake
def _(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.float32)


def _seed() -> Tensor:
    return torch.randint(2**62, (), device="cpu")


def _kept(stream: int, x: Tensor, p: float) -> Tensor:
    return own_uniform(x.detach(), _seed(), stream) >= p


def _dropout(stream: int, x: Tensor, p: float, train: bool) -> Tensor:
    return _native_dropout(stream, x, p, train)[0]


def _native_dropout(
    stream: int, x: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is not None and not train:
        return x, torch.ones_like(x, dtype=torch.bool)
    kept = _kept(stream, x, p)
    # 1 / (1 - p) keeps the expectation; with p = 1 nothing is left to scale.
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _feature_dropout(stream: int, x: Tensor, p: float, train: bool) -> Tensor:
    if not train:
        return x
    # One number for each channel of a sample, stretched over its positions.
    by_channel = x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2))
    kept = _kept(stream, by_channel, p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0)


def _alpha_dropout(stream: int, x: Tensor, p: float, train: bool) -> Tensor:
    if not train:
        return x
    kept = _kept(stream, x, p)
    # The affine map that brings mean 0 and variance 1 back (Klambauer et al. 2017, section 2).
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    return scale * (torch.where(kept, x, -_ALPHA) + _ALPHA * p)


def _plain_attention(
    stream: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return _native_dropout(stream, scores.softmax(-1), dropout_p)[0] @ value
