"""Megatron-LM's options: what each takes, and what a price makes of it.

In: nothing. Out: `OPTIONS`, from which flags are read, and docs/megatron-flags.md is written. Every
option is of one part:

- ``priced``: a column of a row, or the device's rates, follow from it (`priced`);
- ``refused``: a price would be wrong, and there is none (`refused`);
- ``none``: a price is the same with it (`unpriced`).

What values are is written ``int``, ``float``, ``str``, or "" where there is none; behind that
stands ``+`` for one or more, ``*`` for any number, and ``3`` for three.

Source: NVIDIA/Megatron-LM at d98e8a64ddf3 (2026-08-22), megatron/training/arguments.py and the
configurations that it makes options of (transformer_config.py, training/config).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from planner.emit.megatron_flags.priced import CHOICES, MAY_BE_ZERO, PRICED
from planner.emit.megatron_flags.refused import REFUSED
from planner.emit.megatron_flags.unpriced import UNPRICED

Part = Literal["priced", "refused", "none"]
"""What a price makes of an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of Megatron-LM's command line."""

    takes: str
    """``int``, ``float``, ``str``, or "" where it takes no value."""
    words: str
    """How many values: "" for one, ``+`` for one or more, ``*`` for any number, ``3``."""
    part: Part
    """What a price makes of it."""
    why: str
    """What follows from it; or why it is refused, or of no part."""
    choices: tuple[str, ...] = ()
    """The values it may have; any where empty."""
    harmless: tuple[str, ...] = ()
    """Values with which a refused option says nothing."""
    least: int | None = None
    """The least whole number; None: it has none."""


def _options(table: dict[str, dict[str, str]], part: Part) -> Iterator[tuple[str, Option]]:
    for why, kinds in table.items():
        for kind, names in kinds.items():
            for name in names.split():
                yield name, _option(name, kind, part, why)


def _option(name: str, kind: str, part: Part, why: str, harmless: str = "") -> Option:
    takes = kind.rstrip("+*3")
    is_priced_number = takes == "int" and part == "priced"
    return Option(
        takes=takes,
        words=kind[len(takes) :],
        part=part,
        why=why,
        choices=CHOICES.get(name, ()),
        harmless=tuple(harmless.split()),
        least=int(name not in MAY_BE_ZERO) if is_priced_number else None,
    )


OPTIONS: dict[str, Option] = {
    **dict(_options(PRICED, "priced")),
    **{
        name: _option(name, kind, "refused", why, harmless)
        for name, (kind, harmless, why) in REFUSED.items()
    },
    **dict(_options(UNPRICED, "none")),
}
"""Options by name."""

__all__ = ["OPTIONS", "Option", "Part"]
