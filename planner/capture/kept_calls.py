"""Tensors that a forward keeps from one call for the next.

A forward that takes its positions or its mask from a function under ``functools.lru_cache`` is
captured as if it was called for the first time: what an earlier call left there was made by
another batch or by none of the graph's ops, and what a capture leaves there has no values. What
is kept may as well be computed anew in each step (`rehearsal` finds where it may not).
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def forget_kept_calls() -> None:
    """Empty every cache of functools that holds tensors.

    A cache may be emptied at any time: its function is called again. PyTorch's own stay, and
    those that hold parameters, which several modules may share.
    """
    wrapper = functools._lru_cache_wrapper
    found = [
        kept
        for kept in gc.get_referrers(wrapper)  # instances refer to their type
        if type(kept) is wrapper and _holds_tensors(kept)
    ]
    for kept in found:
        kept.cache_clear()


def _holds_tensors(kept: Any) -> bool:
    if not kept.cache_info().currsize or str(kept.__module__).split(".")[0] == "torch":
        return False
    tensors = [t for t in tree_leaves(gc.get_referents(kept)) if isinstance(t, torch.Tensor)]
    return bool(tensors) and not any(isinstance(t, torch.nn.Parameter) for t in tensors)
