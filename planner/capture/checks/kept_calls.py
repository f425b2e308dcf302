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


class KeptCalls:
    """The caches of functools that hold tensors, or may come to. Mutable: they are found once.

    A cache may be emptied at any time: its function is called again. PyTorch's own stay, and
    those that hold parameters, which several modules may share.
    """

    def __init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Look for all caches there are: some 50 ms, as every object is looked at."""
        wrapper = functools._lru_cache_wrapper
        referrers = gc.get_referrers(wrapper)  # instances refer to their type
        self._found = [
            kept
            for kept in referrers
            if type(kept) is wrapper and str(kept.__module__).split(".")[0] != "torch"
        ]

    def forget(self) -> None:
        """Empty the caches that hold tensors."""
        for kept in self._found:
            if _holds_tensors(kept):
                kept.cache_clear()


def _holds_tensors(kept: Any) -> bool:
    if not kept.cache_info().currsize:
        return False
    tensors = [t for t in tree_leaves(gc.get_referents(kept)) if isinstance(t, torch.Tensor)]
    return bool(tensors) and not any(isinstance(t, torch.nn.Parameter) for t in tensors)
