"""What a plan decides, in words: the same words wherever a plan is named in a line."""

from __future__ import annotations

from collections.abc import Mapping


def spell_degrees(sizes: Mapping[str, object]) -> str:
    """Return the sizes that are not 1: ``dp 4 x pp 2``."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "one device"


def spell_microbatches(count: int, size: int) -> str:
    """Return ``4 microbatches of 2``."""
    return f"{count} microbatch{'es' * (count != 1)} of {size}"


def spell_choices(
    sizes: Mapping[str, object],
    vpp: int,
    microbatches: tuple[int, int],
    schedule: str,
    zero: int,
    recompute: str,
    *,
    shares: str = "",
) -> str:
    """Return a plan's choices: ``dp 2 x pp 4, vpp 2, 8 microbatches of 1, interleaved_1f1b, ZeRO 1,
    recompute none``.

    `microbatches` are their number and the samples of each; a schedule is told of a pipeline alone.
    """
    parts = [spell_degrees(sizes)]
    if vpp > 1:
        parts.append(f"vpp {vpp}")
    parts.append(spell_microbatches(*microbatches) + shares)
    if sizes.get("pp", 1) != 1:
        parts.append(schedule)
    return ", ".join([*parts, f"ZeRO {zero}", f"recompute {recompute}"])
