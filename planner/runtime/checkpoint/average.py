"""The average of weights over steps, each rank's of its own pieces.

    decay d:      average <- d * average + (1 - d) * weights      after each update
    no decay:     the mean of the weights after each update (SWA, Izmailov et al. 2018)

The first update copies, as `torch.optim.swa_utils.AveragedModel` does. What the optimizer steps on
is averaged: with precision "bf16" the fp32 copies. Nothing is sent, and checkpoints have averages
beside weights, so they go on under any plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.runtime.state.gather import gather

if TYPE_CHECKING:
    from planner.runtime.checkpoint.parts import Part
    from planner.runtime.step.engine import Engine


class WeightAverage:
    """A rank's averages of trained parameters. Mutable: they move with the engine's updates."""

    def __init__(self, engine: Engine, *, decay: float | None, every: int) -> None:
        """See `Engine.average_weights`."""
        if decay is not None and not 0.0 <= decay < 1.0:
            raise PlanError(f"decay={decay} must be from 0 to below 1, or None for the mean")
        if every < 1:
            raise PlanError(f"every={every} must be at least 1: the updates between two averages")
        self._engine, self._decay, self._every = engine, decay, every
        self._count = torch.zeros((), dtype=torch.int64)
        engine.rest()
        self._averages = {
            fqn: [param.detach().clone() for param in copies]
            for fqn, copies in self._trained().items()
        }
        engine.after_step.append(self._take)

    @property
    def count(self) -> int:
        """How many updates the averages are of."""
        return int(self._count)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model with averages for its weights, whole, on rank 0's CPU; {} elsewhere.

        Buffers are those of the last step. Every rank calls it.
        """
        engine = self._engine
        state = engine.full_state_dict()
        wanted = [meta for meta in engine.graph.params if meta.requires_grad]
        found = gather(
            engine.graph,
            engine.plan,
            engine.mesh,
            wanted,
            lambda meta: (self._averages[meta.fqn][0], engine._param_placements[meta.name]),
        )
        return state | {name: found[name].to(t.dtype) for name, t in state.items() if name in found}

    def begin_anew(self) -> None:
        """Take the next weights as the first: those averaged so far are of another training."""
        self._count.zero_()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the engine evaluate with averages for its weights; every rank enters it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def parts(self, params: dict[str, Part]) -> list[Part]:
        """Return the stored parts of the averages; `params` are those of the parameters."""
        from planner.runtime.checkpoint.parts import local, whole_part

        is_first = self._engine.mesh.global_rank == 0
        return [
            replace(
                params[fqn],
                key=f"average.{fqn}",
                tensors=tuple(map(local, copies)),
                # A training that was saved without averages begins them from its weights.
                fallback=params[fqn].key,
            )
            for fqn, copies in self._averages.items()
        ] + [whole_part("average_count", self._count, is_written=is_first)]

    def _trained(self) -> dict[str, list[nn.Parameter]]:
        held = self._engine._trained.stepped_by_name()
        return {
            fqn: [p for p in copies if p.requires_grad]
            for fqn, copies in held.items()
            if any(p.requires_grad for p in copies)
        }

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        from planner.runtime.checkpoint.parts import local

        trained = self._trained()
        pairs = [
            (local(average), local(param))
            for fqn, averages in self._averages.items()
            for average, param in zip(averages, trained[fqn], strict=True)
        ]
        return [average for average, _ in pairs], [value for _, value in pairs]

    @torch.no_grad()
    def _take(self, loss: Tensor) -> None:
        del loss
        # By the number of updates alone, so that a training that was loaded goes on in this order.
        if self._engine.is_accumulating or self._engine.steps % self._every:
            return
        averages, values = self._pairs()
        # average + share * (weights - average): 1 - d for EMA, 1 / n for the mean of n.
        share = 1.0 - self._decay if self._decay is not None else 1.0 / (self.count + 1)
        if averages:
            torch._foreach_lerp_(averages, values, share if self.count else 1.0)
        self._count += 1

    @torch.no_grad()
    def _swap(self) -> None:
        self._engine.rest()
        for average, value in zip(*self._pairs(), strict=True):
            # Values change places, not tensors: the optimizer and FSDP2 hold these very tensors.
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)
        self._engine.take_values()
