"""The one look that tables, and commands to type next, have in a terminal."""

from __future__ import annotations

from collections.abc import Container, Iterator

from rich import box
from rich.console import Console, ConsoleOptions
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


class NextCommands:
    """What to type next, as (command, what it does): that stands behind the command, or above it
    where a line has no room for both.
    """

    def __init__(self, *commands: tuple[str, str]) -> None:
        self._commands = commands

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines."""
        longest = max(len(command) for command, _ in self._commands)
        fits = all(longest + len(does) + 6 <= options.max_width for _, does in self._commands)
        yield Text("\nNext:", style="bold")
        for command, does in self._commands:
            if fits:
                yield Text(f"  {command.ljust(longest)}", style="cyan") + Text(f"  # {does}")
            else:
                yield Text(f"  # {does}")
                yield Text(f"  {command}", style="cyan", no_wrap=True, overflow="ignore")
