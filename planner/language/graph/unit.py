"""Which samples of a batch belong together: the unit that every part of a batch takes whole.

A model may compute across samples inside fixed groups: a loss of preference pairs, an advantage
inside each group of answers. Cut between the samples of a group it would compute something else. So
the graph of such a model counts these units as its samples: all sizes, microbatches and cuts of it
are in units, whatever a unit holds. What users give and read counts samples.

The samples of a unit are neighbours in the batch, or lie in several runs of it:

    size 2, runs 1    a0 b0 a1 b1 a2 b2      pairs of neighbours
    size 2, runs 2    a0 a1 a2 b0 b1 b2      halves stacked
    size 4, runs 2    a0 b0 a1 b1 c0 d0 c1 d1    two neighbours of each half

Where a script counts pairs as its samples (``batch(3)`` makes three of them), and stacks their
halves, each is alone, and has a row in each run: size 1, runs 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The samples that belong together.

    Attributes:
        size: samples of a unit.
        runs: runs of the batch that they lie in, equally many neighbours in each.
        shown_by: the op that takes them apart, with its line; empty where none does alone.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (a plan's file has it as it is)

    size: int = 1
    runs: int = 1
    shown_by: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for runs that do not divide the size, where it is not one sample."""
        if self.size < 1 or self.runs < 1 or (self.size > 1 and self.size % self.runs):
            raise ValueError(
                f"a unit of {self.size} samples in {self.runs} runs; each run has as many of them"
            )

    @property
    def is_sample(self) -> bool:
        """Whether each sample is on its own, with its rows in one place."""
        return self.size == self.runs == 1

    def runs_of(self, rows: int) -> int:
        """Return the runs in which a tensor of so many rows a unit has them.

        What has fewer rows than there are samples (a label for each pair) has them in one.
        """
        return self.runs if rows % lcm(self.size, self.runs) == 0 else 1

    def places(self, units: Sequence[int], num_units: int) -> list[int]:
        """Return which samples of a batch are in some of its units, as a batch of these has them:
        run by run. Of units of one sample each is where it is.
        """
        if self.size == 1:
            return list(units)
        each = self.size // self.runs
        return [
            (run * num_units + unit) * each + place
            for run in range(self.runs)
            for unit in units
            for place in range(each)
        ]

    @property
    def spelled(self) -> str:
        """What belongs together: "pairs (halves stacked)", "groups of 4 neighbours"."""
        parts = {2: "halves", 3: "thirds"}.get(self.runs, f"{self.runs} equal parts")
        if self.size == 1:
            return "samples" if self.runs == 1 else f"samples ({parts} stacked)"
        name = {2: "pairs", 3: "triplets"}.get(self.size, f"groups of {self.size}")
        if self.runs == 1:
            return f"{name} of neighbours" if self.size < 4 else f"{name} neighbours"
        each = self.size // self.runs
        return f"{name} ({parts} stacked{'' if each == 1 else f', {each} neighbours of each'})"

    @property
    def told(self) -> str:
        """A line on what belongs together and what follows; empty where nothing does."""
        if self.is_sample:
            return ""
        shown = f", as {self.shown_by} shows" if self.shown_by else ""
        if self.size == 1:
            return (
                f"each sample has rows in {self.runs} equal parts of the batch, stacked{shown}: "
                "replicas and microbatches take their samples of each part"
            )
        return (
            f"samples belong together in {self.spelled}{shown}: replicas and microbatches take "
            "whole ones"
        )

    def why_not(self, num_samples: int) -> str:
        """Return why a number of samples makes no whole units, and which do; empty: it does."""
        if num_samples % self.size == 0:
            return ""
        below = num_samples - num_samples % self.size
        near = f"{below} or {below + self.size}" if below else f"{self.size}"
        return (
            f"samples belong together in {self.spelled}, so it must be a multiple of {self.size}: "
            f"use {near}"
        )


SAMPLE = Unit()
"""Each sample on its own."""
