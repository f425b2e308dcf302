"""Results that functools keeps from call to call, when they are tensors.

A forward that takes its positions or its mask from a function under ``functools.lru_cache`` is
captured as if it was called for the first time: what an earlier call left there was made by
another batch or by none of the graph's ops, and what a capture leaves there has no values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def without_kept_calls() -> Iterator[None]:
    """Empty, before and after, every cache of functools that holds a tensor.

    A cache may be emptied at any time: its function is called again. Those of PyTorch itself
    stay as they are.
    """
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for kept in gc.get_objects():
        if type(kept) is functools._lru_cache_wrapper and _holds_tensors(kept):
            kept.cache_clear()


def _holds_tensors(kept: Any) -> bool:
    if not kept.cache_info().currsize or str(kept.__module__).split(".")[0] == "torch":
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(gc.get_referents(kept)))
