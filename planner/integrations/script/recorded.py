"""A model file made of a training script, for `planner search`.

    import planner

    model, batch = planner.recorded("train.py", "--epochs", "3")

The script runs up to its first backward: what it called, with which batch, and how it computed the
loss is what a plan is searched for.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.capture.export import meta_copy
from planner.errors import ModelError
from planner.integrations.script.finding import Found
from planner.integrations.script.loss import Loss
from planner.integrations.script.ranks import Variables, as_follower
from planner.integrations.script.replaced import replaced
from planner.integrations.script.running import Running
from planner.integrations.script.taken import Loop, TrainingCall


class _Recorded(BaseException):
    """The script's first step; no Exception, as a script may catch these."""

    def __init__(self, model: nn.Module, call: TrainingCall, loss: Loss) -> None:
        super().__init__()
        self.model, self.call, self.loss = model, call, loss


class _FirstStep(Loop):
    """A loop that ends where a plan would begin."""

    def __init__(self, found: Found, *_: Any) -> None:
        super().__init__(found, None, Variables())

    def add(self, call: TrainingCall, loss: Loss, fetch: Any) -> Never:
        """Hand over the first step."""
        self._left.take_back()
        raise _Recorded(self.model, call, loss)


def recorded(
    script: str | os.PathLike[str], *args: str
) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]:
    """Return model() and batch(size) of a script; see `planner.recorded`."""
    step = _first_step(Path(script), [str(arg) for arg in args])
    named = {name: value for name, value in step.call.named_inputs.items() if value is not None}
    given = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    samples = next((len(tensor) for tensor in given.values() if tensor.dim()), 0)
    if samples < 2:
        raise ModelError(
            f"the first batch of {script} has {samples} samples, which does not tell what counts "
            "samples in its tensors; give the script a batch of 2 or more"
        )
    for number, target in enumerate(step.loss.targets):
        named[_free(f"target_{number}" if number else "target", named)] = target
    leaves = {path: value for path, value in named.items() if isinstance(value, Tensor)}
    module = step.loss.trained(meta_copy(step.model), leaves)
    first = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), named)

    def model() -> nn.Module:
        return meta_copy(module)

    def batch(size: int) -> dict[str, Any]:
        def resized(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] % samples:
                return tensor
            rows = torch.arange(size) % samples
            each = tensor.shape[0] // samples
            return tensor.unflatten(0, (samples, each))[rows].flatten(0, 1)

        made: dict[str, Any] = tree_map_only(Tensor, resized, first)
        return made

    return model, batch


def _first_step(script: Path, args: list[str]) -> _Recorded:
    """Run a script up to its first step. Raises ModelError where it has none."""
    if not script.is_file():
        raise ModelError(f"no script {script}; give the Python file that trains the model")
    running = Running(None, Variables(), loop=_FirstStep)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with as_follower(), replaced(running):
            runpy.run_path(str(script), run_name="__main__")
    except _Recorded as found:
        return found
    except SystemExit as error:
        raise ModelError(
            f"{script} {' '.join(args)} left with {error.code!r} before its first training step; "
            "give the arguments that it trains with"
        ) from error
    finally:
        sys.argv, sys.path[:] = argv, path
    raise ModelError(
        f"{script} ended without a training step: no module was called in training mode whose "
        "parameters a torch optimizer has, with a backward behind it; give the script that trains"
    )


def _free(name: str, taken: dict[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name
