"""Cells of a row: numbers and words as people write them, and what blank ones were taken to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from costmodel.table.rows.row_words import is_blank
from planner.errors import PlannerError

LARGEST = 10**9
"""No count of a run is larger; what is was meant otherwise."""

_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([kmbt]?)", re.I)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WORDS = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}


class RowError(PlannerError):
    """A row lacks what an estimate needs, or contradicts itself."""


class Cells:
    """A row's cells; `assumed` lists what blank ones were taken to be."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """Return a cell's text, empty when it says nothing."""
        value = self._row.get(name)
        return "" if is_blank(value) else str(value).strip()

    def raw(self, name: str) -> str:
        """Return a cell's text, also a word such as ``none``."""
        value = self._row.get(name)
        return "" if value is None or value != value else str(value).strip()

    def given(self, name: str, *, least: int = 1, thousand: int = 1000) -> int | None:
        """Return a whole number, or None where the cell is blank.

        `thousand` is what a ``k`` stands for. Raises RowError for other words, for parts of a
        whole, and for numbers below `least` or that no run has.
        """
        text = self.text(name)
        if not text:
            return None
        number = _WORDS.get(text.lower(), real(text, thousand=thousand))
        if number is None:
            raise RowError(f"column {name} holds {text!r}; it must be a number")
        if number != int(number):
            raise RowError(f"{name}={text} must be a whole number")
        if number < least:
            raise RowError(f"{name}={int(number)} must be at least {least}")
        if number > LARGEST:
            raise RowError(f"{name}={number:g} is more than any run has ({LARGEST:g})")
        return int(number)

    def number(self, name: str, usual: int | None, *, least: int = 1) -> int:
        """Return a cell's whole number, or the usual one, and note it."""
        value = self.given(name, least=least)
        if value is None and usual is None:
            raise RowError(f"column {name} is blank; an estimate needs it")
        return self.assume(name, usual) if value is None else value

    def assume(self, name: str, value: Any) -> Any:
        """Note what a column was taken to be, and return it."""
        self.assumed.append(f"{name}={value}")
        return value


def real(text: str, *, thousand: int = 1000) -> float | None:
    """Return the number that a text is, such as ``1,024``, ``8k`` or ``7B``; None for words."""
    found = _NUMBER.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None:
        return None
    scale = thousand if found[2].lower() == "k" else _SCALES[found[2].lower()]
    number = float(found[1]) * scale
    return number if abs(number) < 1e18 else None
