"""Conditions that only raise: ``if labels.max() >= self.vocab_size: raise ValueError(...)``.

They read a tensor's values, which a capture does not have. Where nothing but an exception hangs on
a condition, the capture goes on as where it does not raise, and the check is not in the graph, as
those of ``torch._assert`` are not. All other conditions of values are left to fail.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from itertools import islice
from types import FrameType

Place = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column, of an expression in a file."""


class Compared:
    """A number of which all comparisons are alike, in the place of ``lengths.max().item()``."""

    def __init__(self, outcome: bool) -> None:
        self._outcome = outcome

    def _compare(self, other: object) -> bool:
        return self._outcome

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __eq__ = __ne__ = _compare
    __hash__ = None  # type: ignore[assignment]


def value_that_passes(frame: FrameType) -> bool | Compared | None:
    """Return the value with which the expression that a frame evaluates raises nothing: a truth
    value, or for an operand of a comparison that is a condition by itself a number.

    None where more than an exception hangs on it: it is not a condition of ``if ...: raise`` or
    ``assert`` by itself or joined by ``and``, ``or``, ``not``; or the exception may be caught.
    """
    conditions = _conditions(frame.f_code.co_filename)
    passes = next((conditions[each] for each in _evaluated(frame) if each in conditions), None)
    return None if passes is None or _is_caught(frame) else passes


def _evaluated(frame: FrameType) -> list[Place]:
    """Return the places of what a frame runs now and, where that is a jump, of what it tests.

    Python 3.11 gives a jump the place of the expression around the one that it tests. Where Python
    runs without columns (-X no_debug_ranges) places are of no expression.
    """
    # Instructions are units of two bytes.
    code, unit = frame.f_code, frame.f_lasti // 2
    before = unit - 1
    # The test stands ahead of the jump, whose argument may have prefixes.
    while before > 0 and code.co_code[2 * before] == dis.EXTENDED_ARG:
        before -= 1
    places = list(islice(code.co_positions(), unit + 1))
    return [places[unit], places[before]]


@functools.lru_cache
def _conditions(file: str) -> dict[Place, bool | Compared]:
    """Return the conditions in a file on which only an exception hangs, and what passes them."""
    found: dict[Place, bool | Compared] = {}
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Assert):
            _add(found, node.test, passes=True)
        elif isinstance(node, ast.If) and _only_raises(node.body):
            _add(found, node.test, passes=False)
    return found


def _add(found: dict[Place, bool | Compared], test: ast.expr, *, passes: bool) -> None:
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            _add(found, part, passes=passes)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _add(found, test.operand, passes=not passes)
    else:
        found[_place(test)] = passes
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], _COMPARISONS):
            operands = [test.left, *test.comparators]
            for each in operands if len(operands) == 2 else []:
                if _is_item(each):
                    found[_place(each)] = Compared(passes)


_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


def _is_item(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and (
        isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args
    )


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether statements lead to an exception and nothing else: what is before makes its text."""
    simple = (ast.Assign, ast.AnnAssign, ast.Expr)
    return isinstance(body[-1], ast.Raise) and all(isinstance(each, simple) for each in body[:-1])


def _is_caught(frame: FrameType) -> bool:
    """Whether the exception may be caught by a function on the way to it, and be of use."""
    from planner.capture.diagnose import is_users

    each: FrameType | None = frame
    while each is not None and "_planner_tree" not in getattr(
        each.f_locals.get("self"), "__dict__", {}
    ):
        file, line = each.f_code.co_filename, each.f_lineno
        if is_users(file) and any(first <= line <= last for first, last in _caught_lines(file)):
            return True
        each = each.f_back
    return False


@functools.lru_cache
def _caught_lines(file: str) -> list[tuple[int, int]]:
    """Return the lines whose exceptions a file may catch and not raise again.

    A handler that ends in ``raise`` may return before that.
    """
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno)
        for node in ast.walk(_parsed(file))
        if (
            isinstance(node, ast.Try | ast.TryStar)
            and not all(_only_raises(each.body) for each in node.handlers)
        )
        or (isinstance(node, ast.With) and any(map(_suppresses, node.items)))
    ]


def _suppresses(item: ast.withitem) -> bool:
    """Whether it is ``contextlib.suppress(...)``; other contexts let exceptions through."""
    call = item.context_expr
    func = call.func if isinstance(call, ast.Call) else call
    return "suppress" in (getattr(func, "attr", ""), getattr(func, "id", ""))


@functools.lru_cache(maxsize=8)
def _parsed(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _place(node: ast.expr) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
