"""A run as a row, and what a kind of configuration is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Columns = Mapping[str, Any]
"""A part of a row, by column (docs/estimate-rows.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedRun:
    """A run as a row."""

    row: dict[str, Any]
    """By column."""
    notes: tuple[str, ...] = ()
    """What the user should hear of how it was read, a line each."""

    @property
    def texts(self) -> dict[str, str]:
        """The row as a table holds it."""
        return {name: str(value) for name, value in self.row.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A kind of file that configures runs."""

    name: str
    """What it is called: ``a torchtitan .toml``."""
    is_for: Callable[[Path], bool]
    """Whether a file is one of its kind."""
    read: Callable[[Path, Columns], DescribedRun]
    """Return the part of a row that a file says, of its path and what else is known; ``gpus`` and
    ``gpu`` are in there. Raises PlannerError, in one line, where it is broken."""
