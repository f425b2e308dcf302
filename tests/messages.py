"""Messages of refusals, read from the source: where each is raised, its text, and its tests.

A message is the text of an error of `planner.errors`. Its template has `{...}` where values stand.
A test asserts it if a string of the test has `LEAST` characters in a row of the template that no
other template has.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from commands.render.flags import with_flags

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planner", "profiles", "costmodel", "search", "commands")
ERRORS = {
    "PlannerError", "ModelError", "CaptureError", "PlanError", "LayoutError", "ScheduleError",
    "ProfileError",
}  # fmt: skip
KINDS_OF = {"UnlikeExports": "CaptureError"}
"""Errors of one room that are told as another."""
LEAST = 12
HOLE = "{...}"


@dataclass(frozen=True, kw_only=True)
class Message:
    """A place that refuses something."""

    module: str
    """File, from the root."""
    line: int
    """Where it is raised."""
    error: str
    """Name of its class."""
    template: str
    """Its text, as the command line prints it."""


@cache
def all_messages() -> tuple[Message, ...]:
    """Return all messages that have fixed text, in the order of files."""
    return tuple(
        message
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for message in _messages_of(path)
    )


def _messages_of(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        name = KINDS_OF.get(name, name)
        template = with_flags(_template(call.args[0]))
        if name in ERRORS and template.replace(HOLE, "").strip():
            yield Message(
                module=str(path.relative_to(ROOT)),
                line=node.lineno,
                error=name,
                template=" ".join(template.split()),
            )


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return HOLE


def _grams(text: str) -> set[str]:
    """Return all runs of `LEAST` characters."""
    return {text[at : at + LEAST] for at in range(len(text) - LEAST + 1)}


@cache
def _asserted_grams() -> frozenset[str]:
    """Return the runs of all strings of tests; of patterns, of what they do not leave open."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name in ("messages.py", "test_messages.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(r"\\([^\w])", r"\1", node.value)
                if len(text) < 400:
                    found |= _grams(" ".join(with_flags(text).split()))
    return frozenset(found)


@cache
def _grams_of_messages() -> Counter[str]:
    """Return in how many templates each run stands."""
    found: Counter[str] = Counter()
    for template in {message.template for message in all_messages()}:
        found.update({gram for piece in template.split(HOLE) for gram in _grams(piece)})
    return found


def is_asserted(message: Message) -> bool:
    """Whether a test has a run of the message's text that is its alone."""
    grams = {gram for piece in message.template.split(HOLE) for gram in _grams(piece)}
    shared, asserted = _grams_of_messages(), _asserted_grams()
    return any(shared[gram] == 1 and gram in asserted for gram in grams)


@cache
def commands_of() -> dict[str, frozenset[str]]:
    """Return, by file, the commands that import it, in a function or at the top, or through others.

    What `planner.apply` alone uses has no command but `launch`, whose ranks it runs in.
    """
    imports = {
        str(path.relative_to(ROOT)): frozenset(_imported(path))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    found: dict[str, set[str]] = {}
    for command in sorted((ROOT / "commands").glob("[a-z]*.py")):
        reached, waiting = set(), [f"commands/{command.name}"]
        while waiting:
            if (file := waiting.pop()) not in reached:
                reached.add(file)
                waiting += imports.get(file, ())
        for file in reached:
            found.setdefault(file, set()).add(command.stem.replace("_", "-"))
    return {file: frozenset(names) for file, names in found.items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            base = name.replace(".", "/")
            for file in (f"{base}.py", f"{base}/__init__.py"):
                if (ROOT / file).exists():
                    yield file
