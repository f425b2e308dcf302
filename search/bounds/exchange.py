"""What replicas exchange at least, however the chain is cut: for bounds that need no boundaries.

A stage's messages of S seconds beside C seconds of compute, in k pieces (a block each), expose

    e = x + (b - x) / k        x(S, C) = `exposed_seconds` of endlessly many pieces, b of a single
                               piece

(`costmodel.time.communication`). x is convex, and doubles where S and C double, so over stages

    sum of x(S_s, C_s) >= x(sum of S, sum of C)

What more pieces hide, b - x, is in each stage at least the sum over its blocks of
(b_i - x(S_i, C_i)), of which it exposes the average: over pp stages of a chain of n blocks at least
the sum of the pp smallest, and the n - pp + 1'st part of all. Our runtime waits for all of a single
piece (b = S); runtimes that cut messages finer than blocks gain nothing from pieces (b = x). S is
taken at the least rate that messages of any stage's size reach, so S of a stage is the sum of its
blocks'. Nothing is hidden on a CPU (x = S), nor after the last job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from costmodel.time.communication import DataParallelSeconds, exposed_seconds, message_pieces
from profiles.profile import Amount
from search.partition.chain_problem import Floats
from search.space.configuration import Configuration
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastExchange:
    """Least seconds of a table's stages under a mesh and ZeRO; remembers answers by pp."""

    table: StageTable
    configuration: Configuration
    """Any of this mesh and ZeRO stage."""
    _each: dict[int, float] = field(default_factory=dict)
    _once: dict[int, float] = field(default_factory=dict)

    def each_s(self, pp: int) -> float:
        """Seconds that a microbatch's jobs are longer by, all stages together."""
        if pp not in self._each:
            rates = self._s_per_byte
            bare = float(self._param_bytes.sum()) - self._shared_bytes
            # The hooks' work is never hidden; messages are, as far as compute lasts.
            self._each[pp] = (
                bare * float(rates.host_forward_s + rates.host_backward_s)
                + self._exposed(rates.forward_s, self.table.forward_s, pp)
                + self._exposed(rates.backward_s, self.table.backward_s, pp)
            )
        return self._each[pp]

    def once_s(self, pp: int) -> float:
        """Seconds beside all microbatches' jobs, of all ranks together, the optimizer's too."""
        if pp not in self._once:
            rates = self._s_per_byte
            bare = float(self._param_bytes.sum()) - self._shared_bytes
            self._once[pp] = (
                self._update_s
                + bare * float(rates.after_s)
                + self._exposed(rates.first_forward_s, self.table.forward_s, pp)
                + self._exposed(rates.last_backward_s, self.table.backward_s, pp)
            )
        return self._once[pp]

    @cached_property
    def each_of_blocks_s(self) -> Floats:
        """Seconds that each block adds to a microbatch on its rank, whatever lies beside it."""
        rates, sizes = self._s_per_byte, self._param_bytes
        # Endlessly many pieces: the least that a block
        # exposes, however many blocks share its stage.
        seconds: Floats = sizes * (rates.host_forward_s + rates.host_backward_s)
        seconds = seconds + self._beside(rates.forward_s * sizes, self.table.forward_s)
        return seconds + self._beside(rates.backward_s * sizes, self.table.backward_s)

    def _exposed(self, s_per_byte: Amount, compute_s: Floats, pp: int) -> float:
        """Return the least that `pp` stages of these blocks expose together."""
        if not s_per_byte:
            return 0.0
        messages_s = s_per_byte * self._param_bytes
        held_twice = self._shared_bytes / max(float(self._param_bytes.sum()), 1.0)
        # Weights that several blocks use are sent once where their users share a stage.
        total = float(messages_s.sum()) * (1.0 - held_twice)
        bare = float(self._beside(total, float(compute_s.sum())))
        if held_twice:  # a stage of both users has less to hide than its blocks apart
            return bare
        pieces = message_pieces(self.table.costs.execution, 1)
        # Each block alone, sent as a single piece: what more pieces would hide of it.
        in_one = self._beside(messages_s, compute_s, num_pieces=pieces)
        hidden = np.sort(in_one - self._beside(messages_s, compute_s))
        # Each stage exposes the mean over its blocks: at least its smallest, and no stage has more
        # than n - pp + 1 blocks to share among.
        return bare + max(float(hidden[:pp].sum()), float(hidden.sum()) / (len(hidden) - pp + 1))

    def _beside(self, messages_s: Amount, compute_s: Amount, num_pieces: Amount = np.inf) -> Amount:
        """Return x of the header, or b for one piece."""
        profile = self.table.profile
        if profile.cluster.device_type == "cpu":
            return messages_s
        return exposed_seconds(profile, messages_s, compute_s, num_pieces=num_pieces)

    @property
    def _param_bytes(self) -> Floats:
        return self.table.blocks.param_bytes

    @cached_property
    def _shared_bytes(self) -> float:
        """Parameters that several blocks use, for each use beyond the first."""
        return sum(size for _, _, size in self.table.ties)

    @cached_property
    def _ranks(self) -> RankStages:
        return RankStages(table=self.table, configuration=self.configuration)

    @cached_property
    def _s_per_byte(self) -> DataParallelSeconds:
        """Least seconds of each kind of exchange for a byte of parameters."""
        sizes = self._param_bytes
        return self._ranks.prices.least_s_per_byte(float(sizes.max()), len(sizes))

    @cached_property
    def _update_s(self) -> float:
        """Seconds of the optimizer, each parameter once."""
        held = float(self._param_bytes.sum()) - self._shared_bytes
        # Where blocks share weights, tensors would count at
        # each user: none count, which is a bound.
        num_tensors = 0.0 if self._shared_bytes else float(self.table.blocks.num_params.sum())
        return self._ranks.prices.update_s(held, num_tensors)
