"""What the blocks of a table take at least, whatever the stage boundaries: what bounds are made of.

All are sums over the chain, or the largest of a block, so they are worked out once for a table and
then looked up by degrees, recompute choice and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from costmodel.time.stage_costs.load import SAVED, StageLoad
from planner.language.plan import Recompute
from search.bounds.exchange import LeastExchange
from search.bounds.round_trips import ZeroBubbleBound
from search.partition.chain_problem import Floats
from search.space.configuration import Configuration, recompute_choices
from search.stages.rank_stages import rank_bound
from search.stages.stage_table import StageTable

Answer = TypeVar("Answer")


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

    def once(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        """Return the answer of a key, computed when it is needed first."""
        if key not in self._answers:
            self._answers[key] = compute()
        answer: Answer = self._answers[key]
        return answer

    def block_s(self, recompute: str) -> Floats:
        """Return each block's seconds of a microbatch, forward and backward, nothing exchanged."""

        def seconds() -> Floats:
            # Each stage may choose, so each block counts with the choice that adds least.
            again_s = self.table.least_recompute_s(recompute_choices(recompute))
            return self.table.forward_s + self.table.backward_s + again_s

        return self.once(("block", recompute), seconds)

    def chain_s(self, recompute: str) -> float:
        """Return the seconds of a microbatch through all blocks, nothing exchanged."""
        return self.once(("chain", recompute), lambda: float(self.block_s(recompute).sum()))

    def microbatch_s(self, config: Configuration) -> float:
        """Return T: the seconds of a microbatch through all blocks, with what replicas exchange."""
        return self.chain_s(config.recompute) + self.exchange(config).each_s(config.pp)

    def exchange(self, config: Configuration) -> LeastExchange:
        """Return what stages exchange with their replicas at least."""
        return self.once(
            ("exchange", config.degrees, config.zero),
            lambda: LeastExchange(table=self.table, configuration=config),
        )

    def early_sends(self, config: Configuration) -> EarlySends:
        """Return how much of backwards may come after their gradients are sent on."""
        is_sharded = config.replication.is_sharded

        def sends() -> EarlySends:
            choices = recompute_choices(config.recompute)
            # Block 0 is out of sums: it lies on stage 0, and no rank waits for stage 0's gradient.
            seconds = self.table.ahead_s(is_sharded=is_sharded, choices=choices)
            whole = self.table.forward_s + self.table.backward_s
            return EarlySends(
                after_first_s=float(seconds[1:].sum()),
                longest_s=float(seconds[1:].max(initial=0.0)),
                # Recomputation is left out of the whole: with more in it, the part is only smaller.
                part=float((seconds / np.where(seconds > 0, whole, 1.0)).max()),
            )

        return self.once(("early sends", config.recompute, is_sharded), sends)

    def zero_bubble(self, config: Configuration) -> ZeroBubbleBound:
        """Return the blocks' F, I and W jobs, nothing exchanged. ZeRO reduces a block's gradients
        when its backward ends, so weight gradients are made with the input's there.
        """
        is_sharded = config.replication.is_sharded

        def jobs() -> ZeroBubbleBound:
            forward_s = self.table.forward_s
            weight_s = self.table.weight_s * (not is_sharded)
            input_s = self.block_s(config.recompute) - forward_s - weight_s
            return ZeroBubbleBound(seconds=np.stack([forward_s, input_s, weight_s], axis=1))

        return self.once(("zero bubble", config.recompute, is_sharded), jobs)

    def rank_bytes(
        self, load: StageLoad, config: Configuration, choices: Sequence[Recompute]
    ) -> Any:
        """Return what a rank needs at least whose stage has this load (numbers, or arrays for
        several), holds one microbatch and takes the recompute choice that needs least.
        """
        kept = reduce(np.minimum, (getattr(load, SAVED[choice]) for choice in choices))
        least = replace(load, saved_bytes=kept)
        # These bounds read no schedule: a split backward proves the least, so it holds for all.
        return rank_bound(self.table, config, least, splits_backward=True).least(1)
