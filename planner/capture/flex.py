"""torch's flex_attention written out, while a model is captured and where one process shows it.

Its higher-order op takes functions of single scores, and `create_block_mask` maps one over all
pairs by a transform: no graph holds either. Written out, a mask is a comparison of positions, which
attention is then told of (`planner.capture.masks`), and on a GPU runs by torch's flex_attention
again; a function of scores is products, the function on all scores at once, and a softmax.
Functions are given positions that broadcast, in place of one pair after another.

Users hold these functions by many names, so it is their code that is replaced. What they compute is
that of torch's `math_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torchs
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.diagnose import calling_line
from planner.errors import CaptureError

_TAKEN = torchs.flex_attention, torchs.create_block_mask
_SIGNATURES = [inspect.signature(function) for function in _TAKEN]


@contextmanager
def flex_written_out() -> Iterator[None]:
    """Let calls of flex_attention and create_block_mask inside compute by plain operations."""
    given = [function.__code__ for function in _TAKEN]
    for function, instead in zip(_TAKEN, ("attention", "block_mask"), strict=True):
        function.__code__ = _code_that_calls(instead)
    try:
        yield
    finally:
        for function, code in zip(_TAKEN, given, strict=True):
            function.__code__ = code


def _code_that_calls(name: str) -> CodeType:
    names: dict[str, Any] = {}
    text = f"from {__name__} import {name}\n return {name}(*args, **kwargs)"
    exec(f"def call(*args, **kwargs):\n {text}", names)
    function = names["call"]
    assert isinstance(function, FunctionType)
    return function.__code__


class _WrittenMask(torchs.BlockMask):
    """What `create_block_mask` gives here: the mask itself, in place of its blocks."""

    def __init__(self, mask_mod: Any, lengths: tuple[int, int], mask: Tensor) -> None:
        self.mask_mod, self.seq_lengths, self.mask = mask_mod, lengths, mask

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, heads, queries, keys."""
        return (*self.mask.shape[:2], *self.seq_lengths)

    def to(self, device: Any) -> _WrittenMask:
        """Return itself: where tensors lie is the plan's choice."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"forward takes a BlockMask apart{calling_line()}, which a plan has no blocks of; make "
            "each mask that attention is given by create_block_mask"
        )

    __getitem__ = __repr__ = __str__ = as_tuple = numel = sparsity = to_dense = to_string = _refuse
    _adjust = _refuse


class _NotGiven:
    """Stands for the sample or the head in a mask that is made for all of them alike."""

    def __init__(self, name: str, like: Tensor) -> None:
        object.__setattr__(self, "_told", (name, like))

    def __getattribute__(self, attribute: str) -> Any:
        name, like = object.__getattribute__(self, "_told")
        if attribute in ("new_ones", "new_zeros", "new_full", "new_tensor", "device", "dtype"):
            return getattr(like, attribute)
        raise CaptureError(
            f"create_block_mask{calling_line()} is given {name}=None and a mask_mod that reads "
            f"its {'sample' if name == 'B' else 'head'}; give it the number of them"
        )

    def _read(self, *_: Any) -> Any:
        return self.shape

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __index__ = __bool__ = __hash__ = _read


def block_mask(*args: Any, **kwargs: Any) -> _WrittenMask:
    """Stand in for `create_block_mask`: the mask of all pairs."""
    given = _SIGNATURES[1].bind(*args, **kwargs)
    given.apply_defaults()
    mask_mod, batch, heads = (given.arguments[name] for name in ("mask_mod", "B", "H"))
    lengths = int(given.arguments["Q_LEN"]), int(given.arguments["KV_LEN"])
    index: list[Any] = _positions((batch or 1, heads or 1, *lengths))
    for place, (name, count) in enumerate((("B", batch), ("H", heads))):
        if count is None:
            index[place] = _NotGiven(name, index[place])
    return _WrittenMask(mask_mod, lengths, _as_mask(mask_mod(*index), mask_mod))


def _positions(shape: tuple[int, ...]) -> list[Any]:
    """Return the numbers along each of four dims, which broadcast."""
    return [
        torch.arange(size)[tuple(slice(None) if dim == place else None for dim in range(4))]
        for place, size in enumerate(shape)
    ]


def _as_mask(made: Any, of: Any) -> Tensor:
    """Return what a function gave of four dims, as a tensor of four dims."""
    if not isinstance(made, Tensor):
        made = torch.full((), made)
    if made.dim() > 4:
        raise CaptureError(
            f"{getattr(of, '__name__', of)}, a function of flex_attention{calling_line()}, indexes "
            "a tensor twice in a row, which is taken once with all indices; write x[b, q] in place "
            "of x[b][q]"
        )
    return made[(None,) * (4 - made.dim())] if made.dim() < 4 else made


def attention(*args: Any, **kwargs: Any) -> Any:
    """Stand in for `flex_attention`."""
    call = _SIGNATURES[0].bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query, key, value = given["query"], given["key"], given["value"]
    score_mod, scale, grouped = given["score_mod"], given["scale"], given["enable_gqa"]
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise CaptureError(
            f"flex_attention{calling_line()} takes queries, keys and values of 4 dims; they have "
            f"{query.dim()}, {key.dim()} and {value.dim()}"
        )
    if len(key) != len(query):
        key, value = (each.expand(len(query), -1, -1, -1) for each in (key, value))
    pairs = (len(query), query.shape[1], query.shape[2], key.shape[2])
    mask = _mask_of(given["block_mask"], pairs)
    wants_more = given["return_lse"] or given["return_aux"] is not None
    if score_mod is None and not wants_more:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    if grouped and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = _as_mask(score_mod(scores, *_positions(pairs)), score_mod).to(wide).expand(pairs)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # A query that sees no key has the result 0, and no gradient.
    highest = scores.amax(-1, keepdim=True)
    is_alone = highest == -torch.inf
    weights = scores.masked_fill(is_alone, 0.0).softmax(-1).masked_fill(is_alone, 0.0)
    made = weights.to(query.dtype) @ value.to(query.dtype)
    if not wants_more:
        return made
    logsumexp = scores.masked_fill(is_alone, 0.0).logsumexp(-1)
    logsumexp = logsumexp.masked_fill(is_alone.squeeze(-1), -torch.inf)
    if given["return_lse"]:
        return made, logsumexp
    asked = given["return_aux"]
    return made, torchs.AuxOutput(
        lse=logsumexp if asked.lse else None,
        max_scores=highest.squeeze(-1) if asked.max_scores else None,
    )


def _mask_of(mask: Any, pairs: tuple[int, ...]) -> Tensor | None:
    """Return the mask of a BlockMask; None without one."""
    if mask is None:
        return None
    if tuple(mask.seq_lengths) != pairs[2:]:
        raise CaptureError(
            f"flex_attention{calling_line()} is given a mask of {mask.seq_lengths} queries and "
            f"keys for {pairs[2]} and {pairs[3]}; make it for as many by create_block_mask"
        )
    if isinstance(mask, _WrittenMask):
        return mask.mask
    # Made before the forward, with blocks: which must be those of its function.
    if mask.mask_mod is torchs.noop_mask and not _is_full(mask):
        raise CaptureError(
            f"flex_attention{calling_line()} is given a BlockMask of blocks alone, without a "
            "mask_mod that says the same of each pair, which a plan can't hold; make it by "
            "create_block_mask from a mask_mod"
        )
    return _as_mask(mask.mask_mod(*_positions(pairs)), mask.mask_mod)


def _is_full(mask: torchs.BlockMask) -> bool:
    with _disable_current_modes(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return not mask.kv_num_blocks.is_meta and bool(mask.to_dense().all())
