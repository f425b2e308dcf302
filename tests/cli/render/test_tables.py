"""Tables in a terminal: no frame, digits below each other."""

from __future__ import annotations

import io

from rich.console import Console

from commands.render.tables import light_table


def test_numbers_end_at_one_edge_below_a_title():
    table = light_table("part", "time", title="Where the time goes", numbers=("time",))
    table.add_row("compute", "7.68 s")
    table.add_row("optimizer", "524 us")
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(table)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "",
        "Where the time goes",
        "part         time",
        "─" * 17,
        "compute    7.68 s",
        "optimizer  524 us",
    ]
