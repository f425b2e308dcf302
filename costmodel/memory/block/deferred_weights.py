"""Weight gradients deferred in a backward: what they wait with, and what making them takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from costmodel.memory.block.backward_walk import DeferredWeight


def weight_job(
    deferred: Sequence[DeferredWeight], *, first: bool, gradient_factor: int
) -> tuple[int, int]:
    """Return the height of a job that makes deferred weight gradients, above its start, and the
    bytes of gradients it leaves. The last deferred are made first.
    """
    users = Counter(name for product in deferred for name in dict(product.held))
    started: set[str] = set()
    live = peak = left = 0
    for product in reversed(deferred):
        # The gradient of a view goes to what it is a view of, as a tensor with zeros around it.
        weight = product.weight_bytes if product.adds else product.whole_bytes
        made = weight + product.bias_bytes
        adds = product.adds and gradient_factor == 1
        is_begun = product.is_begun or product.weight in started
        started.add(product.weight)
        stays = gradient_factor * (product.bias_bytes if is_begun else made) if first else 0
        if first and not is_begun:
            # Autograd copies a gradient that it is given: the giver still refers to it.
            passing = 0 if adds else made
        else:
            # Where sums are fp32 and products bf16, a gradient is made, cast, added and freed.
            passing = product.bias_bytes if adds else made * (2 if gradient_factor > 1 else 1)
            passing += 0 if product.adds else weight
        peak = max(peak, live + stays + passing)
        left += stays
        live += stays
        for name, size in dict(product.held).items():
            users[name] -= 1
            live -= 0 if users[name] else size
    return peak, left


def deferred_storages(deferred: Sequence[DeferredWeight]) -> dict[str, int]:
    """Return what deferred weight gradients wait with, each storage once."""
    return {name: size for product in deferred for name, size in product.held}
