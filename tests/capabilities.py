"""What the finished system can do, by id: which tests prove it.

A test proves a capability where its docstring, or that of its module or class, names the id.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

COUNTS = {"P": 33, "M": 27, "D": 22, "V": 14, "X": 15, "N": 22, "G": 18, "B": 18}
"""Capabilities by letter, each numbered from 1: pipelines and their timeline; operators, layouts,
search and host memory; meshes and placements; virtual pipelines, groups and launch flags; what no
peer has together; what the field trains with; mechanics of the runtime; right by default."""

NOT_BUILT: dict[str, str] = {}
"""Capabilities that no test proves yet."""

IDS = tuple(f"{letter}{number}" for letter, most in COUNTS.items() for number in range(1, most + 1))

_ID = re.compile(r"\b[A-Z]\d{1,2}\b")
_PARTS = (ast.Module, ast.FunctionDef, ast.ClassDef)


def proofs(folder: Path) -> dict[str, set[str]]:
    """Return the test files under a folder that name each capability."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            told = (ast.get_docstring(node) if isinstance(node, _PARTS) else None) or ""
            for name in _ID.findall(told):
                found[name].add(path.relative_to(folder).as_posix())
    return found
