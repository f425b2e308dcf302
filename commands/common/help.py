"""Help in groups: commands by what they are for, options by what they decide, common ones first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class GroupedCommands(TyperGroup):
    """The app: its commands under the panel that each was added with."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, in the order in which commands were added."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in named if command and not command.hidden]
        width = formatter.width - 6 - max(len(name) for name, _ in shown)
        _write_sections(
            formatter,
            (
                (_panel_of(command, "Commands"), (name, command.get_short_help_str(width)))
                for name, command in shown
            ),
        )

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order in which commands were added."""
        return list(self.commands)


class GroupedOptions(TyperCommand):
    """A command: its options under the panel that each was declared with."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section for each panel, in the order of the options."""
        records = [
            (_panel_of(parameter, "Options"), parameter.get_help_record(ctx))
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option"
        ]
        arguments = [
            ("Arguments", parameter.get_help_record(ctx))
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "argument"
        ]
        shown = [(panel, record) for panel, record in (*arguments, *records) if record]
        _write_sections(formatter, shown)


def _panel_of(part: Any, default: str) -> str:
    return getattr(part, "rich_help_panel", None) or default


def _write_sections(formatter: Any, records: Iterable[tuple[str, tuple[str, str]]]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for panel, record in records:
        sections.setdefault(panel, []).append(record)
    for panel, written in sections.items():
        with formatter.section(panel):
            formatter.write_dl(written)
