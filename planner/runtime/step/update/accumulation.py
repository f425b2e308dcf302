"""Gradients of several batches for a single update: their mean, as of the batches in a row.

A batch counts by its samples, or by what the loss weight counts in it:

    gradient = sum_k w_k g_k / sum_k w_k     w_k: weight of batch k, g_k: gradient of its mean loss

Backwards of batch k start from w_k / w_0 times the weights of its parts, so that sums have the size
of a batch's gradient, and at the end are divided by sum_k w_k / w_0. They are summed over ranks
once, at the update (ZeRO 2 and 3 keep shards, and reduce in every backward as ever).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.errors import PlanError
from planner.language.ops.samples.state import ADDED
from planner.runtime.batches.inputs.feed import Feed


class Accumulation:
    """The batches since the last update. Mutable.

    Attributes:
        is_last: whether the batch that was added last ends the update.
        are_means: whether the loss of what was added last is a mean, in all of its terms.
        counted: how much each batch of the last update counted in its mean.
    """

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._totals: dict[str, float] = {}
        self._are_sums = False
        self.is_last = True
        self.are_means = False
        self.counted: tuple[float, ...] = (1.0,)

    @property
    def is_open(self) -> bool:
        """Whether gradients of batches wait for an update."""
        return bool(self._weights)

    def add_sum(self, feed: Feed) -> Feed:
        """Take in a batch whose gradient is added to those before, however much counts in it."""
        self.is_last = False
        totals = feed.totals()
        self.are_means = bool(totals) and ADDED not in totals
        self._weights.append(1.0)
        self._are_sums = True
        return feed

    def add(self, feed: Feed, *, is_last: bool) -> Feed:
        """Take in a batch; return its feed with the gradients that its backwards start from.

        Raises PlanError where terms of the loss count batches differently: no weight of a batch
        makes them what they are of the batches in a row.
        """
        if is_last and not self.is_open:
            self.is_last = is_last
            self.counted = (1.0,)
            return feed  # a batch alone, as ever
        totals = feed.totals()
        self._refuse_uneven(totals)
        self.is_last = is_last
        self._weights.append(next(iter(totals.values()), 1.0))
        self._are_sums = not totals
        # Relative to the first batch, so that sums keep the size of a single gradient.
        share = self._weights[-1] / self._weights[0]
        if share == 1.0:
            return feed
        return replace(feed, loss_weights=[weight * share for weight in feed.loss_weights])

    def _refuse_uneven(self, totals: Mapping[str, float]) -> None:
        if not self.is_open:
            self._totals = dict(totals)
        if len(totals) < 2:
            return
        shares = [total / self._totals[term] for term, total in totals.items()]
        if ADDED in totals or not all(isclose(share, shares[0], rel_tol=1e-9) for share in shares):
            told = [float(f"{total:.6g}") for total in totals.values()]
            raise PlanError(
                f"terms of the loss count the batches of an update differently ({told} in this "
                f"one, {[float(f'{t:.6g}') for t in self._totals.values()]} in the first), so no "
                "mean of their gradients is that of the batches in a row; give them to one "
                "engine.step as one batch"
            )

    @torch.no_grad()
    def finish(self, params: Iterable[nn.Parameter], *, factor: float = 1.0) -> None:
        """Make sums of gradients their mean, where losses are means, and multiply by `factor`."""
        if self._weights:
            # Losses that are sums add up over batches: there is nothing to divide by.
            factor /= 1.0 if self._are_sums else sum(self._weights) / self._weights[0]
            self.counted = tuple(self._weights)
            self._weights.clear()
        if factor == 1.0:
            return
        grads = [_local(param.grad) for param in params if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def forget(self) -> None:
        """Let go of batches that no update followed."""
        self._weights.clear()

    def refuse_open(self, what: str) -> None:
        """Raise PlanError where gradients wait for an update."""
        if self.is_open:
            raise PlanError(
                f"{what} after engine.step(..., update=False) would lose the gradients of "
                f"{len(self._weights)} batches; do it after a step that updates"
            )


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
