"""Activation recomputation of a block: keep its inputs, run it again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import checkpoint

Outputs = tuple[Any, ...]


class Recomputed:
    """A block's run that keeps only its inputs, and runs again when gradients come.

    Random state is restored for the second run, so dropout masks are the same; programs
    are straight-line, so the (slow) check that both runs agree is left out. `again` tells
    a block that it runs for the second time, so that it leaves its buffers alone.
    """

    def __init__(self, run: Callable[..., Outputs]) -> None:
        self._run = run
        self.again = False

    def __call__(self, *inputs: Any) -> Outputs:
        """Run the block on its inputs."""
        return checkpoint(
            self._run,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=True,
            determinism_check="none",
            context_fn=self._contexts,
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), self._second_run()

    @contextlib.contextmanager
    def _second_run(self) -> Iterator[None]:
        self.again = True
        try:
            yield
        finally:
            self.again = False
