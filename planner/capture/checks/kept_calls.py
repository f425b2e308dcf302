"""Tensors that a forward keeps from one call for the next.

A forward that takes its positions or its mask from a function under ``functools.lru_cache`` is
captured as if it was called for the first time: what an earlier call left there was made by
another batch or by none of the graph's ops, and what a capture leaves there has no values. What
is kept may as well be computed anew in each step (`rehearsal` finds where it may not).
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

_LRU_CACHE = functools._lru_cache_wrapper


class KeptCalls:
    """The caches of functools that hold tensors, or may come to. Mutable: they are found once.

    A cache may be emptied at any time: its function is called again. PyTorch's own stay, and
    those that hold parameters, which several modules may share.
    """

    def __init__(self) -> None:
        self._references = 0
        self.find()

    def find(self) -> None:
        """Look for all caches there are, if there are more: 50 ms, as every object is looked at."""
        if sys.getrefcount(_LRU_CACHE) == self._references:  # each cache holds its type once
            return
        # What the process has frozen the collector does not go through.
        is_frozen = gc.get_freeze_count() > 0
        if is_frozen:
            gc.unfreeze()
        # All are held, PyTorch's too: none can end and hide from the count that another began.
        self._all = [kept for kept in gc.get_referrers(_LRU_CACHE) if type(kept) is _LRU_CACHE]
        if is_frozen:
            gc.freeze()
        self._references = sys.getrefcount(_LRU_CACHE)
        self._found = [k for k in self._all if str(k.__module__).split(".")[0] != "torch"]

    def forget(self) -> None:
        """Empty the caches that hold tensors."""
        for kept in self._found:
            if kept.cache_info().currsize and _holds_tensors(kept):
                kept.cache_clear()


def _holds_tensors(kept: Any) -> bool:
    tensors = _tensors(gc.get_referents(kept))
    return bool(tensors) and not any(isinstance(t, torch.nn.Parameter) for t in tensors)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors that are values, or leaves of them. Few of a process' caches have any."""
    found = []
    rest = [values]
    while rest:
        for value in rest.pop():
            kind = type(value)
            if kind is dict:
                rest.append(value.values())
            elif kind is list or kind is tuple:
                rest.append(value)
            elif isinstance(value, torch.Tensor):
                found.append(value)
            elif kind in SUPPORTED_NODES or isinstance(value, tuple):  # tuples with names
                found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
