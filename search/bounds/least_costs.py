"""What the blocks of a table take at least, whatever the stage boundaries: what bounds are made of.

All are sums over the chain, or the largest of a block, so they are worked out once for a table and
then looked up by degrees, recompute choice and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from costmodel.memory.bound import RankBound
from costmodel.time.stage_costs.load import StageLoad
from planner.plan import Recompute
from search.bounds.exchange import LeastExchange
from search.bounds.zero_bubble import ZeroBubbleBound
from search.partition.chain_problem import Floats
from search.space.shapes import Configuration, recompute_choices
from search.stages.stage_table import StageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlySends:
    """How much of backwards may be computed after their gradient is sent on."""

    after_first_s: float
    """Seconds of all blocks but the first together."""
    longest_s: float
    """Seconds of the block but the first that has most of it."""
    part: float
    """The largest part of any block's seconds, forward and backward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastCosts:
    """Least seconds and bytes of a table's blocks; remembers answers."""

    table: StageTable
    _answers: dict[Hashable, Any] = field(default_factory=dict)

    def block_s(self, recompute: str) -> Floats:
        """Return each block's seconds of a microbatch, forward and backward, nothing exchanged."""
        key = "block", recompute
        if key not in self._answers:
            # Of the recompute choices that stages have, the cheapest for each block.
            again = [self.table.recompute_s(choice) for choice in recompute_choices(recompute)]
            self._answers[key] = (
                self.table.forward_s + self.table.backward_s + np.min(again, axis=0)
            )
        seconds: Floats = self._answers[key]
        return seconds

    def chain_s(self, recompute: str) -> float:
        """Return the seconds of a microbatch through all blocks, nothing exchanged."""
        key = "chain", recompute
        if key not in self._answers:
            self._answers[key] = float(self.block_s(recompute).sum())
        return float(self._answers[key])

    def microbatch_s(self, config: Configuration) -> float:
        """Return T: the seconds of a microbatch through all blocks, with what replicas exchange."""
        return self.chain_s(config.recompute) + self.exchange(config).each_s(config.pp)

    def exchange(self, config: Configuration) -> LeastExchange:
        """Return what stages exchange with their replicas at least."""
        key = "exchange", config.degrees, config.zero
        if key not in self._answers:
            self._answers[key] = LeastExchange(
                table=self.table, degrees=config.degrees, zero=config.zero
            )
        exchange: LeastExchange = self._answers[key]
        return exchange

    def early_sends(self, config: Configuration) -> EarlySends:
        """Return how much of backwards may come after their gradients are sent on."""
        key = "early sends", config.recompute, config.replication.is_sharded
        if key not in self._answers:
            choices = recompute_choices(config.recompute)
            seconds = self.table.ahead_s(is_sharded=config.replication.is_sharded, choices=choices)
            whole = self.table.forward_s + self.table.backward_s
            self._answers[key] = EarlySends(
                after_first_s=float(seconds[1:].sum()),
                longest_s=float(seconds[1:].max(initial=0.0)),
                part=float((seconds / np.where(seconds > 0, whole, 1.0)).max()),
            )
        early: EarlySends = self._answers[key]
        return early

    def zero_bubble(self, config: Configuration) -> ZeroBubbleBound:
        """Return the blocks' F, I and W jobs, nothing exchanged. ZeRO reduces a block's gradients
        when its backward ends, so weight gradients are made with the input's there.
        """
        key = "zero bubble", config.recompute, config.replication.is_sharded
        if key not in self._answers:
            forward_s = self.table.forward_s
            weight_s = self.table.weight_s * (not config.replication.is_sharded)
            input_s = self.block_s(config.recompute) - forward_s - weight_s
            self._answers[key] = ZeroBubbleBound(
                seconds=np.stack([forward_s, input_s, weight_s], axis=1)
            )
        bound: ZeroBubbleBound = self._answers[key]
        return bound

    def chain_kept_bytes(self, recompute: str) -> float:
        """Return the bytes that all blocks keep of a microbatch for its backward."""
        key = "kept", recompute
        if key not in self._answers:
            choices = recompute_choices(recompute)
            kept = [np.diff(self.table.runs.kept_sums(choice)) for choice in choices]
            self._answers[key] = float(np.min(kept, axis=0).sum())
        return float(self._answers[key])

    def rank_bytes(
        self, load: StageLoad, config: Configuration, choices: Sequence[Recompute]
    ) -> Any:
        """Return what a rank needs at least whose stage has this load (numbers, or arrays for
        several), holds one microbatch and takes the recompute choice that needs least.
        """
        peaks = [
            RankBound(
                load=load,
                num_microbatches=config.num_microbatches,
                splits_backward=True,
                recompute=choice,
                replicas=config.degrees.along("data"),
                zero=config.zero,
                profile=self.table.profile,
                precision=self.table.precision,
                on_host=self.table.on_host,
            ).least(1)
            for choice in choices
        ]
        return np.min(peaks, axis=0)
