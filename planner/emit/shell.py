"""A shell script read without running it: what its variables are, and which lines a run reads.

What is read: ``NAME=value``, ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``$((expression))``, and
``if`` with tests of texts and numbers. What only a run can tell stays as it is written: commands,
arguments, variables of the environment. Of an ``if`` that tests these the other lines are read, and
loops and ``case`` are not, which mostly read arguments of the script's own.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_USED = re.compile(r"\$(?:\{(\w+)(?:(:?-)([^{}]*))?\}|(\w+))")
_COMPUTED = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARRAY = re.compile(r"^(\s*(?:export\s+|local\s+)?\w+\+?=)\(")
_ARRAY_END = re.compile(r"\)\s*(?:#.*)?$")
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?")

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
"""Of shell arithmetic, on whole numbers; its division drops the rest."""

_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script as it was read."""

    text: str
    """The lines that a run reads, with the values of the script's own variables."""
    unknown: tuple[str, ...]
    """Conditions that only a run can tell, whose lines were left out."""


@dataclass(slots=True)
class _Reading:
    """A script as far as it is read; mutable."""

    values: dict[str, str] = field(default_factory=dict)
    """Variables that are set, by name."""
    branches: list[tuple[bool, bool]] = field(default_factory=list)
    """Of each open `if`: whether its lines are read now, and whether one of its branches was."""
    skipped: int = 0
    """Open loops and `case`s."""
    is_in_array: bool = False
    """Whether an array's closing bracket is still to come."""
    lines: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word in ("while", "until", "for", "case") and not re.search(r"\b(done|esac)\s*$", line):
            self.skipped += 1
        elif word.rstrip(";") in ("done", "esac"):
            self.skipped = max(0, self.skipped - 1)
        elif not self.skipped:
            self._read_branch(word, line)

    def _read_branch(self, word: str, line: str) -> None:
        if word == "if" and not re.search(r";\s*fi\s*$", line):
            taken = self._is_true(line)
            self.branches.append((taken, taken))
        elif word == "elif" and self.branches:
            was_taken = self.branches[-1][1]
            taken = not was_taken and self._is_true(line)
            self.branches[-1] = (taken, was_taken or taken)
        elif word == "else" and self.branches:
            self.branches[-1] = (not self.branches[-1][1], True)
        elif word.rstrip(";") == "fi" and self.branches:
            self.branches.pop()
        elif all(is_read for is_read, _ in self.branches):
            self._read_line(line)

    def _read_line(self, line: str) -> None:
        if _ARRAY.match(line):
            self.is_in_array, line = True, _ARRAY.sub(r"\1( ", line)
        if self.is_in_array and _ARRAY_END.search(line):
            # A bracket is no part of the word that it stands behind.
            self.is_in_array, line = False, _ARRAY_END.sub(" )", line)
        assigned = _ASSIGNED.match(line)
        value = None if assigned is None else self._word(assigned[2])
        if assigned is None or value is None:
            self.lines.append(self.filled(line))
        elif "`" in value or "$(" in value:  # what a command prints
            self.values.pop(assigned[1], None)
        else:
            self.values[assigned[1]] = value

    def _word(self, text: str) -> str | None:
        """Return a value without quotes and comment; None where more than a word stands there."""
        literal = re.match(r"\s*'([^']*)'\s*(?:#.*)?$", text)
        if literal is not None:
            return literal[1]
        try:
            words = shlex.split(self.filled(text), comments=True)
        except ValueError:
            return None
        return " ".join(words) if len(words) < 2 else None

    def filled(self, text: str) -> str:
        """Return a text with the values of variables and of arithmetic."""

        def value(found: re.Match[str]) -> str:
            name, default = found[1] or found[4], found[3]
            if name in self.values and (self.values[name] or found[2] != ":-"):
                return self.values[name]
            return found[0] if found[2] is None else default.strip("\"'")

        def number(found: re.Match[str]) -> str:
            names = re.sub(r"[A-Za-z_]\w*", lambda n: self.values.get(n[0], n[0]), found[1])
            try:
                return str(_computed(ast.parse(names.strip(), mode="eval").body))
            except (SyntaxError, ValueError, ArithmeticError, RecursionError):
                return found[0]

        return _COMPUTED.sub(number, _USED.sub(value, text))

    def _is_true(self, line: str) -> bool:
        """Whether the tests of an `if` hold; where nothing says, its lines are left out."""
        condition = re.sub(r"^\s*(?:el)?if\s+|\s*;?\s*(?:then)?\s*$", "", line)
        either = []
        for part in condition.split("||"):
            tests = [_TEST.fullmatch(test.strip()) for test in part.split("&&")]
            held = [None if test is None else self._holds(test[1]) for test in tests]
            either.append(False if False in held else None if None in held else True)
        if True in either:
            return True
        if None in either:
            self.unknown.append(condition.strip())
        return False

    def _holds(self, test: str) -> bool | None:
        try:
            words = shlex.split(self.filled(test))
        except ValueError:
            return None
        if any("$" in word or "`" in word for word in words):
            return None
        if len(words) in (1, 2) and words[0] in ("-z", "-n"):
            return (len("".join(words[1:])) == 0) == (words[0] == "-z")
        if len(words) != 3:
            return None
        left, sign, right = words
        if sign in ("=", "==", "!="):
            return (left == right) == (sign != "!=")
        if sign in _COMPARED and left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal():
            return _COMPARED[sign](int(left), int(right))
        return None


def read_script(text: str) -> Script:
    """Return a script as a run would read it, as far as it says so itself."""
    reading = _Reading()
    for line in text.replace("\\\n", " ").splitlines():
        reading.read(line)
    return Script(text="\n".join(reading.lines), unknown=tuple(reading.unknown))


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(ast.unparse(node))
