"""A shell script cut into its statements: what stands between semicolons and ends of lines.

Comments and here-documents are left out, lines that go on are joined, and what stands in quotes or
brackets (an array over several lines) is one statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

JOINS = ("&&", "||", "|", "&")
"""What stands between the commands of a statement."""
CASE_END = ";;"
"""A statement of its own: the end of a branch of `case`."""

_HERE = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_REDIRECTS = (">&", "&>", "<&")
"""What has a sign of JOINS in it and joins nothing."""

_LEADS = re.compile(r"(?:[\s;&|(]|^)$")
"""What a comment begins behind."""


def statements_of(text: str) -> list[str]:
    """Return the statements of a script, in order."""
    return [statement for _, statement in _cut(text.replace("\r\n", "\n"), (";", "\n"))]


def commands_of(statement: str) -> list[tuple[str, str]]:
    """Return the commands of a statement, each with what stands before it: "", or one of JOINS."""
    return _cut(statement, JOINS)


def _cut(text: str, ends: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the parts of a text between `ends`, each with the end before it."""
    found: list[tuple[str, str]] = []
    part: list[str] = []
    before = ""

    def close(end: str) -> None:
        nonlocal before
        if made := "".join(part).strip():
            found.append((before, made))
        part.clear()
        before = end

    for token, depth in _tokens(text):
        if depth == 0 and token == CASE_END and ";" in ends:
            close(token)
            found.append(("", token))
        elif depth == 0 and token in ends:
            close(token)
        elif not _HERE.match(token):
            part.append(token)
    close("")
    return found


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield a text in pieces (a sign, a text in quotes, what joins commands), each with how many
    brackets are open around it.
    """
    at, depth, line = 0, 0, ""
    waiting: list[re.Match[str]] = []
    while at < len(text):
        sign = text[at]
        size = 1
        # (<<< has a word behind it, and no document.)
        here = _HERE.match(text, at) if text[at - 1 : at] != "<" and depth == 0 else None
        if text.startswith("\\\n", at):
            yield " ", depth
            at += 2
            continue
        if sign == "#" and _LEADS.search(line[-1:]):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if sign == "\\":
            size = 2
        elif sign == "'":
            size = _end_of(text, at, "'") - at
        elif sign == '"':
            size = _end_of(text, at, '"') - at
        elif here is not None:
            waiting.append(here)
            size = len(here[0])
        elif sign == "\n" and waiting:
            for start in waiting:
                at = _behind(text, at, start)
            waiting.clear()
            yield "\n", depth
            line = ""
            at += 1
            continue
        elif text[at : at + 2] in (CASE_END, *JOINS[:2], *_REDIRECTS):
            size = 2
        elif sign == "(" or text.startswith("${", at):
            depth, size = depth + 1, 2 if sign == "$" else 1
        elif sign in ")}" and depth:
            depth -= 1
        piece = text[at : at + size]
        # (In quotes of this kind lines go on as they do outside.)
        yield (piece.replace("\\\n", "") if sign == '"' else piece), depth
        line = "" if piece == "\n" else piece
        at += size


def _end_of(text: str, at: int, quote: str) -> int:
    """Return where a text in quotes that begins here has ended."""
    at += 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text.startswith("$(", at):
            at = _end_of_command(text, at + 2)
        else:
            at += 2 if text[at] == "\\" and quote == '"' else 1
    return min(at + 1, len(text))


def _end_of_command(text: str, at: int) -> int:
    """Return where a command in ``$(`` that begins here has ended: it has quotes of its own."""
    depth = 1
    while at < len(text) and depth:
        sign = text[at]
        if sign in "'\"":
            at = _end_of(text, at, sign)
            continue
        depth += (sign == "(") - (sign == ")")
        at += 2 if sign == "\\" else 1
    return at


def _behind(text: str, at: int, start: re.Match[str]) -> int:
    """Return the end of the line that ends a here-document, whose first line begins behind `at`."""
    tabs = "\t*" if start[1] else ""
    end = re.compile(rf"\n{tabs}{re.escape(start[3])}(?=\n|$)").search(text, at)
    return len(text) if end is None else end.end()
