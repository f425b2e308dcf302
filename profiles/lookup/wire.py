"""What of a collective crosses each rank's link, and in how many messages one after another."""

from __future__ import annotations

from math import log2


def wire_share(kind: str, size: int) -> float:
    """Return the share of the full tensor that crosses each rank's link."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    if kind in ("broadcast", "send_recv"):
        return 1.0
    raise ValueError(
        f"collective {kind!r} is unknown; use all_reduce, all_gather, reduce_scatter, "
        "all_to_all, broadcast or send_recv"
    )


def num_steps(kind: str, size: int) -> float:
    """Return the number of dependent messages, which is what alpha counts."""
    if kind == "send_recv":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * max(log2(size), 1.0)
