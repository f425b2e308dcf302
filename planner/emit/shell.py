"""A shell script read without running it: what its variables are, and which lines a run reads.

What is read: ``NAME=value``, ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``$((expression))``,
arrays, functions where they are called, and ``if``, ``case``, ``&&`` and ``||`` with tests of texts
and numbers. What only a run can tell stays as it is written: commands, arguments, variables of the
environment. Of what tests these the other lines are read; loops are not, which mostly read
arguments of the script's own. Both are named.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from planner.emit.shell_statements import CASE_END, commands_of, statements_of

_SETS = re.compile(r"(?:export|local|readonly|declare|typeset)\b(?:\s+-\w+)*\s*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_USED = re.compile(r"\$(?:\{(\w+)(?:(:?[-=])([^{}]*))?\}|(\w+))")
_COMPUTED = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_COMPUTES = re.compile(r"(?:let\s+|\(\(\s*)[\"']?(\w+)\s*=\s*([^=].*?)[\"']?\s*(?:\)\))?")
_ARRAY = re.compile(r"([A-Za-z_]\w*\+?=)\((.*)\)", re.DOTALL)
_ARRAY_USED = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_FUNCTION = re.compile(
    r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(.*)", re.DOTALL
)
_CASE = re.compile(r"case\s+(.*?)\s+in\b\s*(.*)", re.DOTALL)
_PATTERN = re.compile(r"\(?\s*([^()]*?)\s*\)\s*(.*)", re.DOTALL)
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?|test\s+(.*)", re.DOTALL)

_WORD = re.compile(
    r"""(?: \$\(\(.*?\)\) | \$\([^()]*\) | \$\{.*?\} | `[^`]*`
        | '[^']*' | "(?:\\.|[^"\\])*" | \\. | \S )+""",
    re.VERBOSE | re.DOTALL,
)

_LONGEST = 1 << 17
"""Signs of a value; a longer one is no word of a command (Linux: MAX_ARG_STRLEN)."""

_DEEPEST = 16
"""Calls within calls of functions, and defaults within defaults."""

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
    """The commands that a run reads, with the values of the script's own variables."""
    unknown: tuple[str, ...]
    """Conditions and loops that only a run can tell, whose lines were left out."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """An open `if`, `case` or loop. Mutable: the branch that is read now."""

    kind: str
    is_read: bool
    """Whether the lines of this branch are read."""
    was_read: bool
    """Whether those of a branch were."""
    word: str | None = None
    """What a `case` compares; None where only a run can tell."""
    is_between: bool = False
    """Whether a `case` is between two branches."""


@dataclass(slots=True)
class _Reading:
    """A script as far as it is read; mutable."""

    values: dict[str, str] = field(default_factory=dict)
    """Variables that are set, by name."""
    arrays: dict[str, str] = field(default_factory=dict)
    """Arrays, as they are written between their brackets."""
    used: set[str] = field(default_factory=set)
    """Arrays that a command was given."""
    functions: dict[str, list[str]] = field(default_factory=dict)
    """Statements of functions, by name."""
    blocks: list[_Block] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    """What was read; of an array its name."""
    unknown: list[str] = field(default_factory=list)
    calls: int = 0
    """Functions within which this is read."""

    @property
    def is_read(self) -> bool:
        """Whether a run comes here."""
        return all(block.is_read for block in self.blocks)

    def read_all(self, statements: Sequence[str]) -> None:
        """Read statements in order; those of a function where it is called."""
        waiting = list(reversed(statements))
        while waiting:
            statement = waiting.pop()
            found = _FUNCTION.fullmatch(statement)
            rest = found and (found[3] or (waiting.pop() if waiting else ""))
            if found and rest and rest[0] in "{(":
                body = _body(rest[1:], waiting)
                if self.is_read:
                    self.functions[found[1] or found[2]] = body
            else:
                self.read(statement)

    def read(self, statement: str) -> None:
        """Read a statement."""
        word, *more = statement.split(maxsplit=1)
        rest = more[0] if more else ""
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind == "case" and block.is_between and word != "esac":
            self._branch(block, statement)
        elif statement == CASE_END:
            if block is not None and block.kind == "case":
                block.is_read, block.is_between = False, True
        elif word in ("then", "do", "{", "else", "}"):
            if word == "else" and block is not None:
                block.is_read, block.was_read = not block.was_read, True
            if rest:
                self.read(rest)
        elif word in ("if", "elif"):
            self._condition(word, rest, block)
        elif word in ("while", "until", "for", "select"):
            if self.is_read:
                self.unknown.append(statement)
            self.blocks.append(_Block(kind="loop", is_read=False, was_read=False))
        elif word == "case" and (case := _CASE.match(statement)):
            self._case(case[1])
            if case[2]:
                self.read(case[2])
        elif word in ("fi", "done", "esac"):
            if self.blocks:
                self.blocks.pop()
        elif self.is_read:
            self._commands(statement)

    def _condition(self, word: str, condition: str, block: _Block | None) -> None:
        if word == "elif" and block is None:
            return
        if word == "if" or block is None:
            taken = self.is_read and self._is_true(condition)
            self.blocks.append(_Block(kind="if", is_read=taken, was_read=taken))
            return
        outer = all(each.is_read for each in self.blocks[:-1])
        block.is_read = outer and not block.was_read and self._is_true(condition)
        block.was_read |= block.is_read

    def _case(self, text: str) -> None:
        word = self._word(text)
        if word is not None and "$" in word:
            word = None
        if word is None and self.is_read:
            self.unknown.append(f"case {text} in")
        self.blocks.append(
            _Block(kind="case", is_read=False, was_read=False, word=word, is_between=True)
        )

    def _branch(self, block: _Block, statement: str) -> None:
        found = _PATTERN.match(statement)
        if found is None:
            return
        block.is_between = False
        if block.word is not None and not block.was_read:
            patterns = [each.strip().strip("\"'") for each in found[1].split("|")]
            block.is_read = any(fnmatchcase(block.word, pattern) for pattern in patterns)
            block.was_read = block.is_read
        if found[2]:
            self.read(found[2])

    def _commands(self, statement: str) -> None:
        """Read the commands of a statement, as far as what stands before them lets them run."""
        held: bool | None = True
        before = ""
        for join, command in commands_of(statement):
            if held is not {"&&": True, "||": False}.get(join, held):
                if held is None:
                    self.unknown.append(before)
                continue
            before, test = command, _TEST.fullmatch(command)
            if test is None:
                self._command(command)
                held = True
            else:
                held = self._holds(test[1] or test[2] or "")

    def _command(self, command: str) -> None:
        name = command.split(maxsplit=1)[0]
        if name in self.functions and self.calls < _DEEPEST:
            self.calls += 1
            self.read_all(self.functions[name])
            self.calls -= 1
            return
        text = _SETS.sub("", command, count=1) if _SETS.match(command) else command
        if array := _ARRAY.fullmatch(text):
            self._set_array(array[1], array[2])
        elif name == "unset":
            for each in command.split()[1:]:
                self.values.pop(each, None)
                self.arrays.pop(each, None)
        elif computes := _COMPUTES.fullmatch(command):
            self._set(computes[1], self.filled(f"$(({computes[2]}))"))
        elif not self._assign(text, command is not text):
            is_flags = command.startswith("--")
            self.lines.append(("", self.filled(command) + ("" if is_flags else " ;")))

    def _set_array(self, name: str, text: str) -> None:
        key = name.rstrip("+=")
        added = self.filled(text)
        self.arrays[key] = f"{self.arrays.get(key, '')} {added}" if "+" in name else added
        if len(self.arrays[key]) > _LONGEST:
            del self.arrays[key]
        elif ("array", key) not in self.lines:
            self.lines.append(("array", key))

    def _assign(self, text: str, is_declared: bool) -> bool:
        """Set the variables of assignments; return whether the text has nothing else."""
        found: list[tuple[str, bool, str]] = []
        for word in _words(text):
            start = _ASSIGNED.match(word)
            if start is None and not (is_declared and word.isidentifier()):
                return False
            if start is not None:
                found.append((start[1], bool(start[2]), word[start.end() :]))
        for name, adds, written in found:
            value = self._word(written)
            if value is not None and adds:
                value = self.values.get(name, "") + value
            self._set(name, value)
        return True

    def _set(self, name: str, value: str | None) -> None:
        is_printed = value is not None and ("`" in value or "$(" in value)  # by a command
        is_own = value is not None and re.search(rf"\$\{{?{name}\b", value)  # of the environment
        if value is None or is_printed or is_own or len(value) > _LONGEST:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _word(self, text: str) -> str | None:
        """Return a value without quotes; None where they do not end."""
        literal = re.fullmatch(r"'([^']*)'", text)
        if literal is not None:
            return literal[1]
        try:
            return " ".join(shlex.split(self.filled(text)))
        except ValueError:
            return None

    def filled(self, text: str) -> str:
        """Return a text with the values of variables, of arrays and of arithmetic."""

        def value(found: re.Match[str]) -> str:
            name, default = found[1] or found[4], found[3]
            if name in self.values and (self.values[name] or not (found[2] or "").startswith(":")):
                return self.values[name]
            if found[2] is None:
                return found[0]
            default = default.strip("\"'")
            if found[2].endswith("="):
                self._set(name, default)
            return default

        def array(found: re.Match[str]) -> str:
            if found[1] not in self.arrays:
                return found[0]
            self.used.add(found[1])
            return self.arrays[found[1]]

        def number(found: re.Match[str]) -> str:
            names = re.sub(r"[A-Za-z_]\w*", lambda n: self.values.get(n[0], n[0]), found[1])
            try:
                return str(_computed(ast.parse(names.strip(), mode="eval").body))
            except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
                return found[0]

        text = _ARRAY_USED.sub(array, text)
        for _ in range(_DEEPEST):  # (from within: a default may have a variable of its own)
            before, text = text, _USED.sub(value, text)
            if text == before or len(text) > _LONGEST:
                break
        return _COMPUTED.sub(number, text)

    def _is_true(self, condition: str) -> bool:
        """Whether the tests of an `if` hold; where nothing says, its lines are left out."""
        either = []
        for part in condition.split("||"):
            tests = [_TEST.fullmatch(test.strip()) for test in part.split("&&")]
            held = [None if test is None else self._holds(test[1] or test[2]) for test in tests]
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

    def text(self) -> str:
        """Return what was read; arrays that no command was given only where none is."""
        kept = []
        for kind, line in self.lines:
            if kind and not self.used and line in self.arrays:
                kept.append(f"{line}=( {self.arrays[line]} )")
            elif not kind:
                kept.append(line)
        return "\n".join(kept)


def read_script(text: str) -> Script:
    """Return a script as a run would read it, as far as it says so itself."""
    reading = _Reading()
    reading.read_all(statements_of(text))
    return Script(text=reading.text(), unknown=tuple(dict.fromkeys(reading.unknown)))


def _body(first: str, waiting: list[str]) -> list[str]:
    """Take the statements of a function from those that wait, up to the bracket that ends it."""
    body, depth = [], 1
    if first.strip():
        waiting.append(first.strip())
    while waiting:
        statement = waiting.pop()
        depth += statement.startswith("{") or statement.endswith((" {", "){"))
        depth -= statement.startswith(("}", ")"))
        if not depth:
            break
        body.append(statement)
    return body


def _words(text: str) -> list[str]:
    """Return the words of a text as they are written, quotes and all."""
    return [found[0] for found in _WORD.finditer(text)]


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(ast.unparse(node))
