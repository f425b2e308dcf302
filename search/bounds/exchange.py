"""What replicas exchange at least, however the chain is cut: for bounds that know no boundaries.

A stage's messages of S seconds beside C seconds of compute, in n pieces, leave exposed

    e = x + (S - x) / n        x(S, C) = `exposed_seconds` of endlessly many pieces

(`costmodel.time.communication`). x is convex and grows in proportion, so over stages

    sum of x(S_s, C_s) >= x(sum of S, sum of C)

and what is hidden, S - x, is in each stage at least the sum over its blocks of (S_i - x(S_i, C_i)),
of which it exposes the average: over pp stages of n blocks at least the sum of the pp smallest, and
the n - pp + 1'st part of all. S is taken at the least rate that messages of any stage's size reach,
so S of a stage is the sum of its blocks'.
Nothing is hidden on a CPU (x = S), nor after the last job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from costmodel.time.communication import BUCKET_BYTES, copies_s_per_byte, exposed_seconds
from costmodel.topology import group_along
from planner.layout.axes import Degrees
from planner.plan.replication import gradient_factor
from profiles.profile import Amount
from search.partition.chain_problem import Floats
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastExchange:
    """Least seconds of a table's stages under a mesh and ZeRO; remembers answers by pp."""

    table: StageTable
    degrees: Degrees
    zero: int
    _each: dict[int, float] = field(default_factory=dict)
    _once: dict[int, float] = field(default_factory=dict)

    def each_s(self, pp: int) -> float:
        """Seconds that a microbatch's jobs are longer by, all stages together."""
        if self.zero < 3:
            return 0.0
        if pp not in self._each:
            forward = self._exposed(self._gather_s, self.table.forward_s, pp)
            both = self._gather_s + self._scatter_s
            self._each[pp] = forward + self._exposed(both, self.table.backward_s, pp)
        return self._each[pp]

    def once_s(self, pp: int) -> float:
        """Seconds beside all microbatches' jobs, of all ranks together, the optimizer's too."""
        if pp not in self._once:
            self._once[pp] = self._update_s + self._once_exchanged(pp)
        return self._once[pp]

    @cached_property
    def each_of_blocks_s(self) -> Floats:
        """Seconds that each block adds to a microbatch on its rank, whatever lies beside it."""
        if self.zero < 3:
            return 0.0 * self.table.forward_s
        both = self._gather_s + self._scatter_s
        seconds: Floats = self._bare(self._gather_s, self.table.forward_s)
        return seconds + self._bare(both, self.table.backward_s)

    def _once_exchanged(self, pp: int) -> float:
        if self.zero == 0:
            return self._reduce_s
        if self.zero == 1:
            gather = self._exposed(self._gather_s, self.table.forward_s, pp)
            return gather + self._exposed(self._scatter_s, self.table.backward_s, pp)
        return 0.0

    def _exposed(self, messages_s: Floats, compute_s: Floats, pp: int) -> float:
        """Return the least that `pp` stages of these blocks expose together."""
        held_twice = self._shared_bytes / max(float(self._param_bytes.sum()), 1.0)
        # Weights that several blocks use are sent once where their users share a stage.
        total = float(messages_s.sum()) * (1.0 - held_twice)
        bare = float(self._bare(total, float(compute_s.sum())))
        if held_twice:  # a stage of both users has less to hide than its blocks apart
            return bare
        hidden = np.sort(messages_s - self._bare(messages_s, compute_s))
        return bare + max(float(hidden[:pp].sum()), float(hidden.sum()) / (len(hidden) - pp + 1))

    def _bare(self, messages_s: Amount, compute_s: Amount) -> Amount:
        """Return x of the header."""
        profile = self.table.profile
        if profile.cluster.device_type == "cpu":
            return messages_s
        return exposed_seconds(profile, messages_s, compute_s, num_pieces=np.inf)

    @property
    def _is_alone(self) -> bool:
        return self.degrees.along("data") == 1

    @property
    def _param_bytes(self) -> Floats:
        return self.table.blocks.param_bytes

    @cached_property
    def _shared_bytes(self) -> float:
        """Parameters that several blocks use, for each use beyond the first."""
        return sum(size for _, _, size in self.table.ties)

    @cached_property
    def _gather_s(self) -> Floats:
        """Least seconds of gathering each block's weights."""
        return self._message_s("all_gather", 1)

    @cached_property
    def _scatter_s(self) -> Floats:
        """Least seconds of reducing each block's gradients to shards."""
        return self._message_s("reduce_scatter", gradient_factor(self.table.precision))

    def _message_s(self, kind: str, factor: int) -> Floats:
        if self._is_alone:
            return 0.0 * self._param_bytes
        most = factor * float(self._param_bytes.max())
        copies = copies_s_per_byte(self.table.profile, self.degrees.along("data"))
        return (self._rate(kind, most) + copies) * factor * self._param_bytes

    @cached_property
    def _reduce_s(self) -> float:
        """Least seconds of summing gradients in buckets."""
        if self._is_alone:
            return 0.0
        held = float(self._param_bytes.sum()) - self._shared_bytes
        reduced = gradient_factor(self.table.precision) * held
        return self._rate("all_reduce", float(BUCKET_BYTES)) * reduced

    def _rate(self, kind: str, most_bytes: float) -> float:
        profile = self.table.profile
        group = group_along(profile.cluster, self.degrees, "data")
        return profile.least_collective_s_per_byte(kind, group, most_bytes=most_bytes)

    @cached_property
    def _update_s(self) -> float:
        """Seconds of the optimizer, each parameter once."""
        held = float(self._param_bytes.sum()) - self._shared_bytes
        num_tensors = 0.0 if self._shared_bytes else float(self.table.blocks.num_params.sum())
        ranks = self.table.with_replicas(degrees=self.degrees, zero=self.zero, choices=("none",))
        return ranks.optimizer_s(held, num_tensors)
