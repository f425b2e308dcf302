"""The checkpoints of a run that the launcher keeps alive: when one is due, and going on from it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.errors import PlanError
from planner.runtime.checkpoint import folder as folders
from planner.runtime.checkpoint.training import Loaded, Training
from planner.runtime.process.groups.together import together

KEEP, SAVE_EVERY = "PLANNER_KEEP", "PLANNER_SAVE_EVERY"
"""Name the folder of a kept run's checkpoints, and after how many steps each is due."""


_kept: dict[Path, weakref.ref[Training]] = {}
"""By the folder of a kept run, the engine of this process that goes on from it."""


class Kept:
    """What `Engine.resume` and `Engine.keep` do; nothing without a launcher that keeps the run.

    Mutable: what is saved beside.
    """

    def __init__(self, engine: Training) -> None:
        self._engine = engine
        folder = os.environ.get(KEEP)
        self._folder = None if folder is None else Path(folder)
        self._every = int(os.environ.get(SAVE_EVERY, "100"))
        self._extra: Mapping[str, Any] | None = None
        self._saved = 0

    def resume(self, extra: Mapping[str, Any]) -> Loaded | None:
        """Go on from the newest whole checkpoint, if there is any; see `Engine.resume`."""
        self._claim("resume")
        self._extra, folder = extra, self._folder
        if folder is None:
            return None

        def newest() -> Path | None:
            if dist.get_rank() > 0:
                return None
            # A run that was killed while it saved, and then has nothing left to save.
            folders.sweep(folder)
            return folders.newest_in(folder)

        found = together(self._engine.state.mesh.control, newest)[0]
        if found is None:
            return None
        loaded = self._engine.load(folder, extra=extra)
        self._saved = loaded.step
        return loaded

    def _claim(self, what: str) -> None:
        """Raise PlanError where another engine of the script is the one that is kept."""
        if self._folder is None:
            return
        other = _kept.get(self._folder, lambda: None)()
        if other is not None and other is not self._engine:
            del other
            gc.collect()  # an engine that the script has let go may wait for it
            if _kept[self._folder]() is not None:
                raise PlanError(
                    f"engine.{what}() of a second engine of the script: a run goes on from one "
                    "checkpoint, of the engine that called engine.resume first; give that one the "
                    "others, which are then saved and loaded with it: "
                    "engine.resume(extra={name: other engine})"
                )
        _kept[self._folder] = weakref.ref(self._engine)

    def keep(self, *, now: bool) -> None:
        """Begin to save if a checkpoint is due, or `now`; see `Engine.keep`."""
        self._claim("keep")
        if self._folder is None:
            return
        if self._extra is None:
            raise PlanError(
                "engine.keep() was called before engine.resume(), so a run that starts again "
                "would begin from the first step; call engine.resume() after planner.apply"
            )
        steps = self._engine.state.steps
        # (Where gradients of several batches make a step, it is saved once, and not between them.)
        is_due = now or steps % self._every == 0
        if is_due and steps != self._saved and not self._engine.is_accumulating:
            self._saved = steps
            self._engine.save(self._folder, extra=self._extra)
