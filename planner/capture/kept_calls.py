"""Results that functools keeps from call to call, when they are tensors.

A forward that takes its positions or its mask from a function under ``functools.lru_cache`` is
captured as if it was called for the first time: what an earlier call left there was made by
another batch or by none of the graph's ops, and what a capture leaves there has no values.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def forget_kept_calls() -> None:
    """Empty every cache of functools that holds a tensor, but for PyTorch's own.

    A cache may be emptied at any time: its function is called again.
    """
    wrapper = functools._lru_cache_wrapper
    for kept in gc.get_referrers(wrapper):  # instances refer to their type
        if type(kept) is wrapper and _holds_tensors(kept):
            kept.cache_clear()


def _holds_tensors(kept: Any) -> bool:
    if not kept.cache_info().currsize or str(kept.__module__).split(".")[0] == "torch":
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(gc.get_referents(kept)))
