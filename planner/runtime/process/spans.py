"""Spans of a rank's work, for the timeline and for a profiler, where either is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from planner.runtime.process.recorder import Recorder

_NOTHING = nullcontext()


class Spans:
    """What a rank's step opens around its parts. Mutable: another recorder may take its place.

    Attributes:
        recorder: of the rank's timeline; None where none is kept.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder

    @property
    def is_on(self) -> bool:
        """Whether anybody looks at jobs."""
        return self.recorder is not None or torch.autograd._profiler_enabled()

    def span(
        self,
        kind: str,
        name: str | None = None,
        stage: int = -1,
        microbatch: int = -1,
        *,
        on_host: bool = False,
        is_job: bool = False,
        lane: str = "",
    ) -> AbstractContextManager[Any]:
        """Return a span of the timeline; without a name it is called by its kind. That of a job a
        profiler gets under its name, too; what is waited for has a `lane`.
        """
        name = name or kind
        span: AbstractContextManager[Any] = _NOTHING
        if self.recorder is not None:
            span = self.recorder.span(kind, name, stage, microbatch, on_host=on_host, lane=lane)
        if is_job and torch.autograd._profiler_enabled():
            return _inside(torch.profiler.record_function(name), span)
        return span

    def end_step(self) -> None:
        """Let the recorder write what has ended."""
        if self.recorder is not None:
            self.recorder.end_step()


@contextmanager
def _inside(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield
