"""The average of weights over steps, each rank's of its own pieces.

    decay d:      average <- d * average + (1 - d) * weights      after each update
    no decay:     the mean of the weights after each update (SWA, Izmailov et al. 2018)

The first update copies, as `torch.optim.swa_utils.AveragedModel` does. What the optimizer steps on
is averaged: with precision "bf16" or "fp16" the fp32 copies. Nothing is sent, and checkpoints have
averages beside weights, so they go on under any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.runtime.state.rank_state import Averages, RankState
from planner.runtime.state.weights import local


class WeightAverage:
    """Moves a rank's averages of trained parameters with its updates."""

    def __init__(
        self,
        state: RankState,
        *,
        decay: float | None,
        every: int,
        is_accumulating: Callable[[], bool],
    ) -> None:
        """See `Engine.average_weights`; `is_accumulating` says that a batch was no update."""
        if decay is not None and not 0.0 <= decay < 1.0:
            raise PlanError(f"decay={decay} must be from 0 to below 1, or None for the mean")
        if every < 1:
            raise PlanError(f"every={every} must be at least 1: the updates between two averages")
        self._state, self._decay, self._every = state, decay, every
        self._is_accumulating = is_accumulating
        state.rest()
        tensors = {
            fqn: [param.detach().clone() for param in copies]
            for fqn, copies in self._trained().items()
        }
        self._averages = Averages(tensors, torch.zeros((), dtype=torch.int64))
        state.averages = self._averages

    @property
    def count(self) -> int:
        """How many updates the averages are of."""
        return int(self._averages.count)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model with averages for its weights, whole, on rank 0's CPU; {} elsewhere.

        Buffers are those of the last step. Every rank calls it.
        """
        held = self._state
        state = held.full_state_dict()
        wanted = [meta for meta in held.graph.params if meta.requires_grad]
        found = held.gathered(
            wanted,
            lambda meta: (self._averages.tensors[meta.fqn][0], held.placements[meta.name]),
        )
        return state | {name: found[name].to(t.dtype) for name, t in state.items() if name in found}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the engine evaluate with averages for its weights; every rank enters it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def take(self, loss: Tensor) -> None:
        """Move the averages behind a step."""
        del loss
        # By the number of updates alone, so that a training that was loaded goes on in this order.
        if self._is_accumulating() or self._state.steps % self._every:
            return
        averages, values = self._pairs()
        # average + share * (weights - average): 1 - d for EMA, 1 / n for the mean of n.
        share = 1.0 - self._decay if self._decay is not None else 1.0 / (self.count + 1)
        if averages:
            torch._foreach_lerp_(averages, values, share if self.count else 1.0)
        self._averages.count += 1

    def _trained(self) -> dict[str, list[nn.Parameter]]:
        held = self._state.trained.stepped_by_name()
        return {
            fqn: [p for p in copies if p.requires_grad]
            for fqn, copies in held.items()
            if any(p.requires_grad for p in copies)
        }

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        trained = self._trained()
        pairs = [
            (local(average), local(param))
            for fqn, averages in self._averages.tensors.items()
            for average, param in zip(averages, trained[fqn], strict=True)
        ]
        return [average for average, _ in pairs], [value for _, value in pairs]

    @torch.no_grad()
    def _swap(self) -> None:
        self._state.rest()
        for average, value in zip(*self._pairs(), strict=True):
            # Values change places, not tensors: the optimizer and FSDP2 hold these very tensors.
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)
        self._state.take_values()
