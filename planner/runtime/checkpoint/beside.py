"""An engine that is saved with another one of the same script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planner.runtime.checkpoint.training import Training


class Beside:
    """An engine that is saved with another one, as an extra of it: in checkpoints of its own, in a
    folder within the other's, of which the other's checkpoint names one. So of two engines what is
    loaded is always of one moment.
    """

    def __init__(self, engine: Training, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    def save(self, keep: int) -> None:
        """Write its checkpoint, whole: a crash after it leaves one more than the other names."""
        self._engine.save(self._folder, keep=keep + 1)
        self._engine.wait_for_save()

    def state_dict(self) -> dict[str, str]:
        """Return which checkpoint it is, on rank 0."""
        return {"checkpoint": self._engine.last_saved}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Load that checkpoint; every rank calls it."""
        self._engine.load(self._folder / state["checkpoint"])
