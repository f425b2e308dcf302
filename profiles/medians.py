"""Medians of readings, and how far they may be off: single readings may be disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median


def robust_deviation(found: Sequence[float], middle: float) -> float:
    """Return the standard deviation about a median: of a normal distribution it is 1.48 times the
    median distance.
    """
    return 1.48 * median(abs(each - middle) for each in found)


def median_and_error(found: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Return a median and its relative standard error, of readings that count as so many samples;
    zeros where the median is not positive.
    """
    middle = median(found)
    if middle <= 0:
        return 0.0, 0.0
    # A median's error is 1.25 times that of a mean.
    return middle, 1.25 * robust_deviation(found, middle) / middle / sqrt(num_samples)
