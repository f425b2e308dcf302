"""Tensors that a forward keeps from one call for the next.

A forward that takes its positions or its mask from a function under ``functools.lru_cache`` is
captured as if it was called for the first time: what an earlier call left there was made by
another batch or by none of the graph's ops, and what a capture leaves there has no values. What
is kept may as well be computed anew in each step, if it is not drawn at random.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from planner.blocks import is_random
from planner.capture.record import Exported
from planner.errors import CaptureError


def forget_kept_calls() -> list[str]:
    """Empty every cache of functools that holds tensors, and return their functions' names.

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
    return [kept.__qualname__ for kept in found]


def _holds_tensors(kept: Any) -> bool:
    if not kept.cache_info().currsize or str(kept.__module__).split(".")[0] == "torch":
        return False
    tensors = [t for t in tree_leaves(gc.get_referents(kept)) if isinstance(t, torch.Tensor)]
    return bool(tensors) and not any(isinstance(t, torch.nn.Parameter) for t in tensors)


def kept_in_module(exported: torch.nn.Module) -> list[str]:
    """Names of what an export left in the module it was made of."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in exported.named_modules()
        for name, value in itertools.chain(vars(part).items(), part._buffers.items())
        if isinstance(value, FakeTensor)
    ]


def check_kept_draws(kept: list[str], exports: Iterable[Exported]) -> None:
    """Raise CaptureError where what is kept may have been drawn: the graph would draw it again."""
    for export in exports:
        for raw, line in zip(export.ops, export.lines, strict=True):
            if kept and is_random(raw.op) and not _drops(raw.op.target):
                raise CaptureError(
                    f"forward draws numbers with {raw.op.target}{line} and keeps a tensor for its "
                    f"next call in {kept[0]}; draw what is kept in __init__ and register it with "
                    "self.register_buffer"
                )


def _drops(target: str) -> bool:
    return "dropout" in target or "attention" in target
