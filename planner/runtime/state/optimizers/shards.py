"""Steps of optimizers on parameters of which a rank has a shard, beside others it has whole."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError
from planner.runtime.state.optimizers.several import Several

_DTENSOR = str(Path(torch.distributed.tensor.__file__).parent)


@contextmanager
def stepping_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise ModelError, in a line, where a step uses what DTensor does not do on shards, such as
    entries that are written by a mask of them (Rprop). Fused kernels step on shards and on wholes
    apart: an op takes DTensors alone, or none.
    """
    try:
        with _apart(optimizer):
            yield
    except RuntimeError as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        if not last.filename.startswith(_DTENSOR):
            raise
        said = str(error).splitlines()[0].partition(". ")[0]
        raise ModelError(
            f"{type(optimizer).__name__} can't step on parameters of which ranks have shards "
            f"({said}); take another optimizer, or search for a plan without ZeRO and tp"
        ) from error


@contextmanager
def _apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, groups of fused kernels have shards or wholes; their steps write nothing into one."""
    found: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
    for part in optimizer.parts if isinstance(optimizer, Several) else (optimizer,):
        groups = part.param_groups
        if any(group.get("fused") and len(_kinds(group)) > 1 for group in groups):
            found.append((groups, [*groups]))
            groups[:] = [
                {**group, "params": params}
                for group in groups
                for params in (_kinds(group) if group.get("fused") else [group["params"]])
            ]
    try:
        yield
    finally:
        for groups, before in found:
            groups[:] = before


def _kinds(group: Mapping[str, Any]) -> list[list[nn.Parameter]]:
    """Return the shards and the wholes of a group, those that there are."""
    by_kind: dict[bool, list[nn.Parameter]] = {}
    for param in group["params"]:
        by_kind.setdefault(isinstance(param, DTensor), []).append(param)
    return [*by_kind.values()]
