"""Names of custom autograd functions that hold in every process: ``Round@1f0c9a2b``.

A graph names the functions it calls by these keys, because the module that defines one goes by
different names (a model file loaded by a command, the same file imported by a script). The
digest is of the code, so that two functions of one name are told apart.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import Any

AUTOGRAD_FUNCTION = "planner.autograd_function.default"
"""The target of an op that calls one; its first argument is the key."""


def function_key(function: Any) -> str:
    """Return the key of a `torch.autograd.Function`."""
    code = source_of(function, (function.forward, function.backward))
    return f"{function.__qualname__}@{hashlib.sha256(code).hexdigest()[:8]}"


def source_of(kind: Any, methods: tuple[Any, ...]) -> bytes:
    """Return the code of a class; where its source can't be read, that of these methods."""
    try:
        # Parsed and printed again: comments, spaces and line numbers do not count.
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind)))).encode()
    except (OSError, TypeError, SyntaxError):  # no source: written at a prompt, or generated
        return b"".join(inspect.unwrap(method).__code__.co_code for method in methods)
