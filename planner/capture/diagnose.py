"""What went wrong with a capture, in one line: the user's code, the reason, what to change."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from planner.errors import ModelError
from planner.files import PACKAGE


def explain(error: BaseException) -> str:
    """One line for an export failure: the user's line, what is wrong with it, what to do."""
    for cause in causes(error):
        if isinstance(cause, ModelError):
            return str(cause)
    line = user_line(error)
    text = _text(error)
    if depends_on_values(error):
        advice = (
            "a Python value depends on a tensor's values, which are unknown when the model is "
            "captured; use torch.where or a mask instead of if, int(), .item() or boolean "
            "indexing, or put it into a module of its own, which then runs as it is"
        )
    elif re.search(_OF_SPARSE, text) or re.search(r"to_sparse|torch\.sparse|sparse_(coo|cs)", line):
        advice = (
            "forward computes with a sparse tensor, which no graph holds; multiply by the dense "
            "form, or gather by its indices and add up (index_add)"
        )
    elif "'NestedTensorMeta' backend" in text or "torch.nested" in line:
        advice = (
            "forward computes with a nested tensor, which no graph holds; fill one tensor up to "
            "the longest, with a mask or lengths beside it"
        )
    elif ".numpy() is not supported" in text or ("np." in line and "Meta" in text):
        advice = (
            "NumPy computes with values, which are unknown when the model is captured; use torch"
        )
    elif "meta tensor" in text.lower() or "Meta" in type(error).__name__:
        advice = "it needs a tensor's values while the model is captured; compute with tensors"
    elif "FakeTensorDeviceMismatch" in text or "found at least two devices" in text:
        advice = (
            "a tensor lies on another device than the model; use torch.tensor(...) in place of "
            "torch.Tensor(...) and torch.from_numpy, or register a buffer"
        )
    elif "view size is not compatible" in text or "Cannot view a tensor" in text:
        advice = (
            "view() takes no tensor whose elements lie apart in memory (a slice, a transpose); use "
            "reshape(), or contiguous() before it"
        )
    elif "fake tensor in the exported program constant" in text:
        advice = (
            "it uses a tensor that none of its ops made (kept from an earlier call in a global "
            "variable, or reached through .data); make it anew in each forward, or register a "
            "buffer in __init__"
        )
    else:
        advice = f"torch.export says {first_line(error)}"
    return f"the model can't be captured{line}: {advice}"


_OF_SPARSE = r"'Sparse\w+' backend|Sparse(Csr)?TensorImpl"

_SIGNS_OF_VALUES = ("data-dependent", "DataDependent", "DynamicOutputShape", "item()")
"""In the words of PyTorch's messages."""


def depends_on_values(error: BaseException) -> bool:
    """Whether a capture failed because what runs depends on a tensor's values."""
    text = _text(error)
    return any(sign in text for sign in _SIGNS_OF_VALUES)


def _text(error: BaseException) -> str:
    return " ".join(f"{type(e).__name__} {e}" for e in causes(error))


def causes(error: BaseException | None) -> Iterable[BaseException]:
    """Yield an error and what it was raised for, the first of all last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_TORCH_DIR = str(Path(torch.__file__).parent)
_OWN_DIR = str(PACKAGE)


def is_users(file: str) -> bool:
    """Whether a file is neither of torch nor of this package."""
    return not file.startswith((_TORCH_DIR, _OWN_DIR, "<"))


def user_line(error: BaseException) -> str:
    """Return `` at file:line: `code``` of the innermost frame of user code, or nothing."""
    for cause in causes(error):
        frames = traceback.extract_tb(cause.__traceback__)
        for frame in reversed(frames):
            if is_users(frame.filename):
                code = linecache.getline(frame.filename, frame.lineno or 0).strip()
                return f" at {frame.filename}:{frame.lineno}: `{code}`"
    return ""


def calling_line() -> str:
    """Return `` at file:line: `code``` of the innermost frame of user code on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if is_users(frame.filename):
            return f" at {frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`"
    return ""


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def node_line(node: torch.fx.Node) -> str:
    """Return `` at file:line: `code``` of the user's code that made a node, if known."""
    file, number, code = _frame(node)
    return f" at {file}:{number}: `{code}`" if file else ""


def source_line(node: torch.fx.Node) -> str:
    """As `node_line`, with the file as its name and folder, for what is kept in a graph."""
    file, number, code = _frame(node)
    return f"{'/'.join(Path(file).parts[-2:])}:{number}: `{code}`" if file else ""


def _frame(node: torch.fx.Node) -> tuple[str, str, str]:
    """File, line number and code of the innermost frame of user code; empty if unknown."""
    trace = node.meta.get("stack_trace") or ""
    lines = trace.strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        text = lines[index].strip()
        file, _, rest = text.removeprefix('File "').partition('", line ')
        if text.startswith('File "') and is_users(file):
            number = rest.split(",")[0]
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            return file, number, code
    return "", "", ""
