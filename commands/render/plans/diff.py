"""The difference of two plans for people: what is decided, who holds what, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from commands.render.tables import light_table
from planner.language.plan.diff import Amount, Change, Difference, Moved
from planner.units import format_bytes, format_seconds
from search.report.words import PART_WORDS

_COSTS = {"step_s": "step", "peak_bytes": "memory of the fullest device"}

MOST_ROWS = 24
"""Of one table; the rows beyond are counted."""


def describe_difference(found: Difference) -> list[RenderableType]:
    """Return the tables of what differs; a line where nothing does."""
    if found.is_empty:
        return [Text("the plans decide the same")]
    tables = [
        _changes("Decisions", found.decisions),
        _changes("Blocks", found.blocks),
        _changes("Layouts", found.layouts),
        _parameters(found.parameters),
        _costs(found.costs),
        _table("Else", ("in the file",), [(path,) for path in found.rest]),
    ]
    return [table for table in tables if table is not None]


def _changes(title: str, changes: Iterable[Change]) -> Table | None:
    rows = [(each.name, each.before, each.after) for each in changes]
    return _table(title, ("what", "before", "after"), rows)


def _parameters(moved: Iterable[Moved]) -> Table | None:
    rows = []
    for each in moved:
        more = f" and {len(each.names) - 1} more" if len(each.names) > 1 else ""
        rows.append(
            (f"{each.names[0]}{more}", format_bytes(each.num_bytes), each.before, each.after)
        )
    return _table("Parameters on other ranks", ("name", "bytes", "before", "after"), rows)


def _costs(costs: Iterable[Amount]) -> Table | None:
    rows = []
    for each in costs:
        spelled = format_bytes if each.unit == "bytes" else format_seconds
        share = f"{each.after / each.before - 1:+.1%}" if each.before else ""
        name = _COSTS.get(each.name) or PART_WORDS.get(each.name, each.name)
        rows.append((name, spelled(each.before), spelled(each.after), share))
    return _table("Predicted cost", ("part", "before", "after", "change"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table | None:
    if not rows:
        return None
    table = light_table(*columns, title=title, numbers=("bytes", "change"))
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > MOST_ROWS:
        table.add_row(f"and {len(rows) - MOST_ROWS} more", *[""] * (len(columns) - 1))
    return table
