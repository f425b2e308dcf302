"""Amounts of bytes rounded for people so that the parts shown add up to the total shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from planner.units import GIB, KIB, MIB


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """Return the unit to show an amount in, with its size."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return unit, size
    return "B", 1


def rounded_parts(parts: Sequence[float], *, digits: int = 2) -> list[float]:
    """Round parts down, then up where most was lost, until they add up to the rounded sum."""
    scaled = [part * 10**digits for part in parts]
    steps = [floor(value) for value in scaled]
    missing = round(sum(scaled)) - sum(steps)
    by_loss = sorted(range(len(parts)), key=lambda index: steps[index] - scaled[index])
    for index in by_loss[:missing]:
        steps[index] += 1
    return [step / 10**digits for step in steps]


def digits_to_tell(amount: float, other: float) -> int:
    """Return how many decimals two different amounts need to look different, 2 at the least."""
    return next((d for d in range(2, 9) if round(amount, d) != round(other, d)), 9)


def listed_parts(
    parts: Mapping[str, float], unit_bytes: int, *, digits: int = 2, signed: bool = False
) -> str:
    """Return ``weights 21.00, gradients 10.50`` in a unit, the largest first, without zeros.

    Signed parts are changes: ``activations -24.00, communication +0.80``.
    """
    names = sorted(parts, key=lambda name: -abs(parts[name]))
    shown = rounded_parts([parts[name] / unit_bytes for name in names], digits=digits)
    form = f"{'+' if signed else ''}.{digits}f"
    return ", ".join(
        f"{name} {amount:{form}}" for name, amount in zip(names, shown, strict=True) if amount
    )
