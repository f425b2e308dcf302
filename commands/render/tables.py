"""The one look that tables have in a terminal."""

from __future__ import annotations

from collections.abc import Container

from rich import box
from rich.table import Table
from rich.text import Text


def light_table(*columns: str, title: str = "", numbers: Container[str] = ()) -> Table:
    """Return a table with a line under its header and no frame, ready for rows.

    A title stands above it after an empty line. Columns in `numbers` end at one edge, so that
    digits of equal weight stand below each other.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        # A title wider than its table is not broken.
        title=Text(f"\n{title}", no_wrap=True, overflow="ignore") if title else None,
        title_justify="left",
        title_style="bold",
    )
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table
