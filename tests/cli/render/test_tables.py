"""Tables in a terminal: no frame, digits below each other."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from commands.render.console import show_results
from commands.render.tables import NextCommands, light_table


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


@pytest.mark.parametrize(("width", "lines"), [(40, 3), (24, 5)])
def test_what_a_command_does_stands_above_it_where_a_line_has_no_room(width, lines):
    commands = NextCommands(("planner show plan.json", "look"), ("planner x", "do x"))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(commands)
    told = [line.rstrip() for line in console.export_text().splitlines()]
    assert told[:2] == ["", "Next:"]
    assert len(told) == 1 + lines
    assert max(map(len, told)) <= width
    assert "  planner show plan.json" in [line[:24] for line in told]


def test_a_long_command_is_not_cut(capsys, monkeypatch):
    """Else what is typed next would name another file."""
    monkeypatch.setenv("COLUMNS", "40")
    command = "planner compare plan.json model.py run --calibrate --profile a-folder"
    show_results(NextCommands((command, "correct the profile")))
    assert f"  {command}" in capsys.readouterr().out.splitlines()
