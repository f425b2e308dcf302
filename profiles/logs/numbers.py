"""Numbers as logs print them."""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = r"(\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)"
"""A positive number, with commas between thousands or not."""

_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def number(text: str) -> float:
    """Return a number such as ``6,123`` or ``1.2e3``."""
    return float(text.replace(",", ""))


def short_number(text: str) -> float:
    """Return a number such as ``1.25K`` or ``4.19M``."""
    found = re.fullmatch(r"([\d.,]+)\s*([KMBGT]?)", text.strip(), re.I)
    if found is None:
        raise ValueError(f"{text!r} is no number")
    return number(found[1]) * _FACTORS[found[2].upper()]


def most(found: Iterable[str], unit_bytes: float) -> float | None:
    """Return the largest of some numbers in bytes; None of none."""
    return max((number(text) * unit_bytes for text in found), default=None)
