"""Weight gradients that are deferred to a later job, and what that job allocates.

Zero-bubble schedules and early sends defer them: the stage before waits for the gradient of the
input only (`planner.runtime.stage.weight_grads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class DeferredWeight(NamedTuple):
    """The gradient of a product's weight, and of its bias, that a later job computes."""

    held: tuple[tuple[str, int], ...]
    """(Name, bytes) of the storages that the product needs until then: its input, its output's
    gradient, and what its operands are views of."""
    weight_bytes: int
    """The weight's gradient."""
    bias_bytes: int
    """The bias's gradient, 0 without a bias."""
    adds: bool
    """Whether the product can add to a gradient that exists (a GEMM with beta = 1). If not,
    autograd makes a gradient of `whole_bytes` first."""
    whole_bytes: int
    """Bytes of the storage that the weight is a view of."""
    weight: str
    """Name of that storage."""
    ahead_bytes: int = 0
    """The most that the product holds before it hands its result on."""
    has_gradient: bool = False
    """Whether another use of the weight has made a gradient by then."""


def weight_job(
    deferred: Sequence[DeferredWeight], *, first: bool, gradient_factor: int
) -> tuple[int, int]:
    """Return the height of a job that computes deferred weight gradients, above its start, and the
    bytes of gradients it leaves. The product deferred last is computed first.
    """
    # A storage that several products need is freed with the last of them.
    users = Counter(name for product in deferred for name in dict(product.held))
    started: set[str] = set()
    live = peak = left = 0
    for product in reversed(deferred):
        # The gradient of a view goes to what it is a view of, as a tensor with zeros around it.
        weight = product.weight_bytes if product.adds else product.whole_bytes
        made = weight + product.bias_bytes
        # A GEMM adds in place only into a sum of the dtype it computes in.
        adds = product.adds and gradient_factor == 1
        has_gradient = product.has_gradient or product.weight in started
        started.add(product.weight)
        # The first microbatch's gradients stay, as wide as sums are. Where another use of the
        # weight came before, only the bias's is new.
        stays = gradient_factor * (product.bias_bytes if has_gradient else made) if first else 0
        if first and not has_gradient:
            # Autograd copies a gradient that it is given: the giver still refers to it.
            temporary = 0 if adds else made
        else:
            # Where sums are wider than products, a gradient is made, added and freed.
            temporary = product.bias_bytes if adds else made
            temporary += 0 if product.adds else weight
        peak = max(peak, live + stays + temporary, live + product.ahead_bytes)
        left += stays
        live += stays
        # Products of one input (query, key, value) share it: the last of them frees it.
        for name, size in dict(product.held).items():
            users[name] -= 1
            live -= 0 if users[name] else size
    return peak, left


def deferred_storages(deferred: Sequence[DeferredWeight]) -> dict[str, int]:
    """Return the storages that deferred weight gradients need, each once."""
    return {name: size for product in deferred for name, size in product.held}
