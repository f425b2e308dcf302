"""Units. Inside the code: seconds, bytes, flop. Data sheets are decimal, memory binary."""

from __future__ import annotations

GB, TB = 10**9, 10**12
KIB, MIB, GIB = 2**10, 2**20, 2**30
HOUR_S, DAY_S = 3_600.0, 86_400.0
TFLOP = 10**12

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes an element takes, by torch dtype name without the ``torch.`` prefix."""


def format_bytes(num_bytes: float) -> str:
    """Return a short human text such as ``1.5 GiB`` (binary units)."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_number(number: float) -> str:
    """Return a number with three digits, or all before the point: ``6.4``, ``1250``."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a short human text such as ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{format_number(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"
