"""A training that is saved and loaded whole: an engine, as far as checkpoints see it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from planner.runtime.state.rank_state import RankState


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded: from which checkpoint, and where training goes on.

    Attributes:
        path: the checkpoint.
        step: optimizer steps done.
        samples: samples trained on.
        casts: what was saved in another dtype than it has here, in words.
    """

    path: Path
    step: int
    samples: int
    casts: tuple[str, ...]


class Training(Protocol):
    """What every rank saves, loads and waits for together; see `Engine`, which is such."""

    @property
    def state(self) -> RankState:
        """What this rank holds."""

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of batches wait for the step that updates."""

    @property
    def last_saved(self) -> str:
        """On rank 0, the name of the last checkpoint that was written; empty without one."""

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save."""

    def wait_for_save(self) -> None:
        """Return when the last save is on the disk."""

    def load(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> Loaded:
        """Take up the training that was saved."""
