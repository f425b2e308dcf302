"""What `planner.apply` is given as a model, as a module without values and what gives it some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from planner.capture.diagnose import first_line
from planner.errors import ModelError
from planner.runtime.initial.record import record
from planner.runtime.initial.recording import NotReplayableError, Recording
from planner.units import format_bytes


class StartWarning(UserWarning):
    """Every process holds the whole model when it starts."""


def without_values(
    given: nn.Module | Callable[[], Any], *, has_weights: bool
) -> tuple[nn.Module, Recording | None]:
    """Return the model, and what gives first values; None where it has them, or files have.

    A function is run on the meta device and recorded. Where that is not possible it is run as it
    is, with a warning. A module on the meta device is recorded while its parts set their
    parameters anew. Raises ModelError for what is no model.
    """
    if isinstance(given, nn.Module):
        is_empty = any(tensor.is_meta for tensor in _tensors(given))
        if not is_empty or has_weights:
            return given, None
        resets = _resets(given)
        recording = record(lambda: [reset() for reset in resets])
        recording.module = given
        return given, recording
    if not callable(given):
        raise ModelError(
            f"planner.apply was given a {type(given).__name__} as the model; give an nn.Module, or "
            "a function that builds one"
        )
    try:
        recording = record(given)
    except Exception as error:
        module = _checked(given())  # which raises what is a mistake of the function's own
        size = sum(tensor.nbytes for tensor in _tensors(module))
        why = str(error) if isinstance(error, NotReplayableError) else first_line(error)
        warnings.warn(
            StartWarning(
                f"each process builds the whole model ({format_bytes(size)}), because its values "
                f"can't be made piece by piece: {why}"
            ),
            stacklevel=4,
        )
        return module, None
    return _checked(recording.module), recording


def _checked(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"the function given to planner.apply returned {type(module).__name__}; return an "
            "nn.Module"
        )
    return module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _resets(module: nn.Module) -> list[Callable[[], Any]]:
    """Return what gives tensors on the meta device the values that their modules begin with.

    Hugging Face's models do so for all of theirs; torch's modules each for its own.
    """
    if callable(whole := getattr(module, "initialize_weights", None)):
        return [whole]
    found = []
    for part in module.modules():
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        resets = (getattr(part, name, None) for name in ("reset_parameters", "_reset_parameters"))
        reset = next(filter(callable, resets), None)
        if reset is not None and any(tensor.is_meta for tensor in own):
            found.append(reset)
    return found
