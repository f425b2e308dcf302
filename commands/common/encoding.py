"""Output under any encoding: what it lacks is printed as what is like it, and never an error.

Terminals and logs of other locales (ISO-8859-1, ASCII) have no lines, bars or arrows, and names of
files are bytes that no encoding need know.
"""

from __future__ import annotations

import codecs
import io
import sys

_ALIKE = {
    "─": "-",
    "│": "|",
    "·": ".",
    "×": "x",
    "±": "+-",
    "→": "->",
    "…": "...",
    "█": "#",
}
_HANDLER = "planner-alike"
_BLOCKS = range(0x2580, 0x25A0)
"""Parts of bars."""


def print_in_any_encoding() -> None:
    """Let stdout take every text: as it is, or by what is like it."""
    codecs.register_error(_HANDLER, _alike)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=_HANDLER)


def _alike(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands for the first character that has no code, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name, as Python holds it (PEP 383)
        return bytes([code - 0xDC00]), error.start + 1
    alike = _ALIKE.get(character, "#" if code in _BLOCKS else "?")
    return alike, error.start + 1
