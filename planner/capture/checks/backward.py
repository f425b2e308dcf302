"""Backwards that one process refuses: a value changed in place, a function that returns too little.

A captured forward is written without writes in place, so what autograd would refuse is not seen
there any more; and functions of the user's own are run in backward alone. Where a forward has
either, its backward is run once, on tensors without values.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from planner.capture.diagnose import first_line, is_users, user_line
from planner.errors import CaptureError

_OF_AUTOGRAD = re.compile(
    r"modified by an inplace operation|returned an invalid gradient|incorrect number of gradients"
    r"|must implement either the backward"
)
_OF_CODE = AttributeError | NameError | TypeError | KeyError | IndexError | ArithmeticError
"""What the user's own code raises, whatever device its tensors are on."""


def refuse_failing_backward(
    loss: Tensor, params: Iterable[Tensor], again: Callable[[], Tensor]
) -> None:
    """Raise CaptureError where autograd refuses the backward of a loss; its graph is spent.

    `again` runs the forward once more, to tell whose line it is. What fails for want of values, or
    of a kernel for tensors without, says nothing of one process.
    """
    wanted = [param for param in params if param.requires_grad]
    error = _error_of(loss, wanted)
    if error is None:
        return
    is_autograds = isinstance(error, RuntimeError) and _OF_AUTOGRAD.search(str(error))
    place = user_line(error)
    if not is_autograds and not (place and isinstance(error, _OF_CODE) and _is_in_users(error)):
        return
    raise CaptureError(
        "the backward of the model fails in one process, too"
        f"{place or _forward_line(again, wanted)}: {first_line(error)}"
    )


def _error_of(loss: Tensor, params: list[Tensor]) -> Exception | None:
    try:
        torch.autograd.grad(loss, params, allow_unused=True)
    except Exception as error:
        return error
    return None


def _is_in_users(error: Exception) -> bool:
    """Whether an error was raised by a line of the user's itself."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and is_users(at.tb_frame.f_code.co_filename)


def _forward_line(again: Callable[[], Tensor], params: list[Tensor]) -> str:
    """Return `` at file:line: `code``` of the op whose backward fails, as autograd tells it."""
    with (
        warnings.catch_warnings(record=True) as told,
        torch.autograd.set_detect_anomaly(True, False),
    ):
        warnings.simplefilter("always")
        _error_of(again(), params)
    traces = [str(each.message) for each in told if "Error detected in" in str(each.message)]
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', traces[0] if traces else "")
    for file, number, code in reversed(frames):
        if is_users(file):
            return f" at {file}:{number}: `{code.strip()}`"
    return ""
