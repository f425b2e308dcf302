"""What a log says of a run, and which of its readings count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from planner.errors import PlannerError
from profiles.medians import median_and_error, robust_deviation

Unit = Literal["seconds", "tokens_per_s_per_device", "samples_per_s"]
"""What a reading is: seconds of a step, or a rate from which these follow with the batch."""

WARM_UP_PART = 0.1
"""Part of the readings at the start that warm up: kernels are chosen and compiled, the allocator
grows, the loader fills. At least the first is left out where there are several."""

FARTHEST = 5.0
"""Readings so many robust standard deviations from the median do not count: steps that wrote a
checkpoint or evaluated."""

LEAST_SPREAD = 0.01
"""Of a run's readings, relative: what is nearer than a few times this is never an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """What a step takes once a run is warm."""

    seconds: float
    """Median of the readings that count."""
    standard_error: float
    """Of the median, relative."""
    used: int
    """Readings that count."""
    warm_up: int
    """Readings at the start that do not."""
    outliers: int
    """Readings far from the others, which do not count either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Parts of a step on the device of a trace, in seconds; they add up to the step."""

    kernels_s: float
    """Some kernel computes."""
    collectives_s: float
    """Collectives run, and no kernel beside them."""
    waits_s: float
    """Messages between stages run, and nothing beside them: mostly waiting for the sender."""
    host_s: float
    """Nothing runs: the host has issued nothing yet."""
    by_kernel_s: Mapping[str, float]
    """Kernels by kind, each counted whole: products, attention, other."""
    by_collective_s: Mapping[str, float]
    """Collectives by kind, what compute hides counted too."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.kernels_s + self.collectives_s + self.waits_s + self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What a log or a trace says of a run."""

    stack: str
    """Who wrote it, for people: ``Megatron-LM``."""
    path: Path
    """The file."""
    digest: str
    """Of what the file holds: the same log counts once."""
    unit: Unit
    """What `readings` are."""
    readings: tuple[float, ...]
    """In the order of steps; one of a log may stand for several steps."""
    allocated_bytes: float | None = None
    """Live tensors of the fullest device that tells, at their peak."""
    reserved_bytes: float | None = None
    """What the allocator held then."""
    parts: StepParts | None = None
    """Parts of a step, of a trace."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """Columns of a row (docs/estimate-rows.md) that the file states, such as ``gpus``."""

    def steady(self, seconds: Callable[[float], float]) -> Steady:
        """Return what a step takes once warm; `seconds` makes a step's seconds of a reading.

        Raises PlannerError where no reading is a time.
        """
        found = [seconds(reading) for reading in self.readings if reading > 0]
        if not found:
            raise PlannerError(
                f"{self.path} has no step that took time; give a log of a run that trained"
            )
        return steady_of(found)


def steady_of(found: Sequence[float]) -> Steady:
    """Return what a step takes, of positive seconds in their order."""
    # A single reading is all there is: an average over the run, or its first steps.
    warm_up = 0 if len(found) == 1 else max(1, round(WARM_UP_PART * len(found)))
    warm = found[warm_up:]
    middle = median(warm)
    farthest = FARTHEST * max(robust_deviation(warm, middle), LEAST_SPREAD * middle)
    used = [each for each in warm if abs(each - middle) <= farthest]
    seconds, error = median_and_error(used, len(used))
    return Steady(
        seconds=seconds,
        standard_error=error,
        used=len(used),
        warm_up=warm_up,
        outliers=len(warm) - len(used),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """A format of logs."""

    stack: str
    """Who writes it, for people."""
    is_of: Callable[[str], bool]
    """Whether a text is in this format."""
    read: Callable[[Path, str, str], RunLog]
    """Return what a file says, of its path, text and digest."""
