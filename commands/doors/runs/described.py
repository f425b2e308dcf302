"""A run as a row, and what a kind of configuration is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.language.stacks.transformer_graph import Sizes
    from planner.language.templates import Transformer

Columns = Mapping[str, Any]
"""A part of a row, by column (docs/estimate-rows.md)."""


def columns_of_sizes(sizes: Transformer | Sizes) -> dict[str, int]:
    """Return a decoder's main sizes by column; those that are not known are not there."""
    columns = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "ffn_hidden": sizes.ffn_hidden,
        "gated_ffn": int(sizes.gated),
        "vocab": sizes.vocab,
        "seq_len": sizes.seq_len,
    }
    return {name: size for name, size in columns.items() if size}


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
