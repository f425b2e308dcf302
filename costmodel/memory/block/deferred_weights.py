"""Weight gradients put aside in a backward: what they wait with, and what making them takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from costmodel.memory.block.backward_walk import Aside


def weight_job(aside: Sequence[Aside], *, first: bool, wide: int) -> tuple[int, int]:
    """Return the height of a job that makes the weight gradients put aside, above its start,
    and the bytes of gradients it leaves. The last put aside are made first.
    """
    users = Counter(name for one in aside for name in dict(one.held))
    begun: set[str] = set()
    live = peak = left = 0
    for one in reversed(aside):
        # A view's gradient goes to what it is a view of as one with zeros around it.
        weight = one.weight_bytes if one.adds else one.whole_bytes
        made = weight + one.bias_bytes
        adds = one.adds and wide == 1
        is_begun = one.is_begun or one.weight in begun
        begun.add(one.weight)
        stays = wide * (one.bias_bytes if is_begun else made) if first else 0
        if first and not is_begun:
            # Given to autograd, a gradient is copied: who gave it has it still.
            passing = 0 if adds else made
        else:
            # Where sums are wider, autograd makes a gradient to be added and let go.
            passing = one.bias_bytes if adds else made * (2 if wide > 1 else 1)
            passing += 0 if one.adds else weight
        peak = max(peak, live + stays + passing)
        left += stays
        live += stays
        for name, size in dict(one.held).items():
            users[name] -= 1
            live -= 0 if users[name] else size
    return peak, left


def held_aside(aside: Sequence[Aside]) -> dict[str, int]:
    """Return what weight gradients put aside wait with, each storage once."""
    return {name: size for one in aside for name, size in one.held}
