"""What files of other systems say of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the files that were given say of a run, as options of `search`."""

    trained: Mapping[str, Any] = field(default_factory=dict)
    """What is trained: precision, global_batch, and so on."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How the files' own runs lay the work out: tp, pp, and so on."""
    notes: tuple[str, ...] = ()
    """What the user should hear of how they were read, in a line each."""

    def __or__(self, other: Said) -> Said:
        return Said(
            trained={**self.trained, **other.trained},
            layout={**self.layout, **other.layout},
            notes=self.notes + other.notes,
        )
