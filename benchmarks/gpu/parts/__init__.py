"""The parts of a run: a file each, with a function that yields a result after each check.

`PARTS` has them in the order that finds most in a second. A part runs in a child process
(`benchmarks.gpu.run_all`), so that a crash or a hang costs that part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from benchmarks.gpu.results import Result, Setting

Run = Callable[[Setting], Iterator[Result]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run."""

    name: str
    share: float
    """Seconds of a run of 12 minutes on a GPU."""
    tiny_share: float
    """Seconds of a run of 3 minutes on a CPU."""
    says: str

    def run(self) -> Run:
        """Return the part's function."""
        run: Run = import_module(f"benchmarks.gpu.parts.{self.name}").run
        return run


PARTS = (
    Part(name="machine", share=25, tiny_share=15, says="versions, clocks, free memory"),
    Part(name="ranks", share=130, tiny_share=40, says="plans of several ranks train as one"),
    Part(name="gpu_tests", share=90, tiny_share=10, says="tests that are marked gpu"),
    Part(name="host", share=50, tiny_share=25, says="host time, synchronisations, checkpoints"),
    Part(name="steps", share=160, tiny_share=40, says="whole steps: predicted and measured"),
    Part(name="plain", share=60, tiny_share=20, says="the same model under FSDP2 alone"),
    Part(name="graphs", share=30, tiny_share=15, says="CUDA graphs of a block and of a stage"),
    Part(name="profile", share=155, tiny_share=45, says="profile of ops, memory, copies"),
    Part(name="repriced", share=20, tiny_share=10, says="steps under the measured profile"),
)
