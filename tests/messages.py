"""Messages of refusals, read from the source: where each is raised, its text, and its tests.

A message is the text of an error of `planner.errors`. Its template has `{...}` where values stand.
A test asserts it if a string of the test, or a piece of its pattern, of at least `LEAST`
characters stands in the template.
"""

from __future__ import annotations

import ast
import re
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
LEAST = 10
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

    @property
    def pieces(self) -> list[str]:
        """The fixed parts of its text."""
        return [piece for piece in self.template.split(HOLE) if piece.strip()]


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


@cache
def asserted_pieces() -> frozenset[str]:
    """Return the strings of tests, cut at what patterns leave open."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name in ("messages.py", "test_messages.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(r"\\([^\w])", r"\1", node.value)
                for piece in re.split(r"\.\*|\.\+|\\[dswS]\+?|\(\?:|\[\^?[^\]]*\]\+?", text):
                    if len(piece.strip()) >= LEAST and len(piece) < 400:
                        found.add(" ".join(piece.split()))
    return frozenset(found)


def is_asserted(message: Message) -> bool:
    """Whether a test has a piece of the message's text."""
    pieces = [" ".join(piece.split()) for piece in message.pieces]
    text = "\n".join(pieces)
    return any(
        asserted in text or any(len(piece) >= 2 * LEAST and piece in asserted for piece in pieces)
        for asserted in asserted_pieces()
    )


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
