"""The lower fidelity: a closed form of a rank's memory that the exact walk never falls below.

A search has no job table yet when it must decide whether a stage may fit, and it must decide for
many stages at once. So memory is bounded by a maximum of lines, each affine in what one microbatch
keeps (which is proportional to the microbatch size b) and in the parameters of the stage:

    bytes(b) >= max over phases p of
                    (live_p * saved(b) + slope_p * params + fixed) * (1 + overhead) + context

    live_p      microbatches in flight at the phase (`lines`)
    saved(b)    bytes that one microbatch keeps for its backward on this stage (`kept_bytes`)
    slope_p     resident bytes per byte of trained parameters: the sum over `part_table.PARTS`
    fixed       resident bytes that depend on neither: frozen tensors, the batch
    overhead    part of live bytes that the allocator loses (`Profile`)
    context     bytes of the framework and the driver

There are three phases because gradients appear late. Replicas without ZeRO reduce gradients in
buckets, which exist from the start. All other gradients appear with the first backward. A stage
that has every microbatch in flight before its first backward therefore has no gradients at its
fullest point, and one microbatch less once it has them.

Resident parts are those of `part_table`, which the exact fidelity reads too; here they are parts of
a stage's load, nothing padded, without step counts and gradients of rows.

`RankBound.least` is the bound. It leaves out the inside of the highest job, posted receive buffers
and FSDP messages; where the exact walk rejects a stage that the bound allows, that walk also says
how much the stage must recompute (`search.nodes.exact_recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np

from costmodel.memory.part_table import PARTS, Part, Phase, State
from costmodel.memory.parts import Ranks
from costmodel.time.stage_costs.load import SAVED, StageLoad
from planner.language.plan import Recompute
from profiles import Profile
from profiles.profile import Amount


def kept_bytes(load: StageLoad, *, recompute: Recompute) -> Amount:
    """Return the bytes that a stage whose blocks recompute alike keeps for each microbatch in
    flight.
    """
    kept: Amount = getattr(load, SAVED[recompute])
    return kept + load.side_bytes


@dataclass(frozen=True, slots=True)
class OnHost:
    """What all plans of a search offload to the host's memory."""

    optimizer: bool = False
    """The optimizer's state."""
    activations: bool = False
    """What microbatches keep for their backwards."""
    tables: bool = False
    """Tables with sparse gradients."""


NOTHING = OnHost()


def live_on_device(in_flight: Any, *, on_host: bool) -> Any:
    """Return how many microbatches' activations a device holds at least at its worst sample.

    With offload these are the microbatch in work and the one that is copied out or in. This is a
    bound: the exact walk also counts microbatches that wait too briefly to be offloaded.
    """
    return np.minimum(in_flight, 2) if on_host else in_flight


class Resident(NamedTuple):
    """Bytes of one part per byte of a stage's trained parameters (and how many more per byte of
    those on the experts' mesh), of all its frozen tensors, of frozen parameters among these, and of
    the global batch.
    """

    per_param_byte: float = 0.0
    per_spread_byte: float = 0.0
    per_frozen_byte: float = 0.0
    per_frozen_param_byte: float = 0.0
    per_batch_byte: float = 0.0


class Line(NamedTuple):
    """live * saved bytes of a microbatch + slope * bytes of parameters + fixed, in bytes."""

    live: Amount
    slope: float
    fixed: Amount


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBound:
    """The memory of a rank with one stage, by how many microbatches it has in flight at most."""

    load: StageLoad
    """What one microbatch and the parameters take on the stage; fields may be arrays."""
    num_microbatches: int
    """Microbatches of a step."""
    recompute: Recompute
    """Which activations are recomputed in the backward."""
    ranks: Ranks
    """How the ranks of the stage keep parameters, gradients and optimizer state."""
    profile: Profile
    """The device's: allocator overhead, context."""
    batch_bytes: int = 0
    """What a rank is given of the batch."""
    splits_backward: bool = False
    """Whether input and weight gradients are separate jobs. Gradients may then come when most
    activations are freed, and activations are freed in two steps, so less can be proved."""
    refills: bool = True
    """Whether as many microbatches are in flight again once the first backward has ended; not where
    nothing is stated of the order of jobs."""
    activations_on_host: bool = False
    """Whether what microbatches keep for their backwards is offloaded to the host."""

    def least(self, in_flight: int) -> Any:
        """Return the bytes that the rank needs at least with so many microbatches in flight."""
        return reduce(
            np.maximum,
            (self.with_saved(live * self._kept, phase) for live, phase in self._samples(in_flight)),
        )

    def may_fit(self, in_flight: int, limit_bytes: float) -> Any:
        """Whether `least(in_flight)` is within a limit, with as few array operations as it can."""
        room = self._room(limit_bytes)
        # The optimizer's step keeps no activations, so its phase is a test of parameters alone.
        fits: Any = self.resident_bytes[Phase.UPDATE] <= room
        for live, phase in self._samples(in_flight):
            fits = fits & (live * self._kept <= room - self.resident_bytes[phase])
        return fits

    def most_kept(self, in_flight: int, limit_bytes: float) -> Any:
        """Return the most that a microbatch may keep of the stage, side inputs apart, for the rank
        to be within a limit; below 0 where nothing is.
        """
        room = self._room(limit_bytes)
        # A phase leaves room - resident for `live` microbatches; the tightest phase decides.
        # `live` is at least 1, as `_samples` has no phase without microbatches.
        most = reduce(
            np.minimum,
            (
                (room - self.resident_bytes[phase]) / live
                for live, phase in self._samples(in_flight)
            ),
        )
        fits = self.resident_bytes[Phase.UPDATE] <= room
        # Side inputs are resident whatever the blocks recompute.
        return np.where(fits, most - self.load.side_bytes, -np.inf)

    def most_saved(self, limit_bytes: float) -> Any:
        """Return the most that the rank may keep at once before its first backward to be within a
        limit; below 0 where nothing is.
        """
        room, resident = self._room(limit_bytes), self.resident_bytes
        before = room - resident[Phase.BEFORE_BACKWARD]
        return np.where(resident[Phase.UPDATE] <= room, before, -np.inf)

    def with_saved(self, saved_bytes: Any, phase: Phase = Phase.BEFORE_BACKWARD) -> Any:
        """Return what the rank needs at least if in a phase it keeps so many bytes at once."""
        resident = self.resident_bytes
        # The optimizer's step comes after the jobs, so the two share memory: the larger counts.
        live = np.maximum(saved_bytes + resident[phase], resident[Phase.UPDATE])
        # The allocator loses a part of what it hands out; the context lies outside of it.
        return live * self._overhead + self.profile.context_bytes

    def lines(self, in_flight: int, limit_bytes: float) -> tuple[Line, ...]:
        """Return the lines that are at or below 0 for any stage that `may_fit` a limit, with
        this rank's options and its `fixed` bytes, whatever its parameters and activations.
        """
        room = self._room(limit_bytes)
        # resident + live * saved <= room, all on one side: a linear form, which a search applies
        # to running sums of the chain, for all runs of a window at once.
        return tuple(
            Line(live, self.slopes[phase].per_param_byte, self._fixed_bytes(phase) - room)
            for live, phase in (*self._samples(in_flight), (0.0, Phase.UPDATE))
        )

    def _samples(self, in_flight: int) -> tuple[tuple[Any, Phase], ...]:
        """Return (microbatches in flight, phase) of each point that may be the fullest."""
        # Each phase's bytes grow with `live`, so its fullest point has the most microbatches.
        # FSDP2 takes a block's gradients as its backward ends: there the job of input gradients
        # runs all of it, and nothing waits for the job of weight gradients.
        splits = self.splits_backward and not self.ranks.is_sharded
        live = live_on_device(in_flight, on_host=self.activations_on_host)
        has_more = in_flight < self.num_microbatches
        if self.ranks.has_buckets or (has_more and self.refills and not splits):
            # With buckets, gradients exist in both phases. Else the rank refills after its first
            # backward: as many microbatches, and gradients.
            return ((live, Phase.AFTER_BACKWARD),)
        # A split backward, and an order of jobs in which the rank may not refill, prove the first
        # phase only. Of a single microbatch nothing is in flight after its backward.
        if splits or has_more or in_flight == 1:
            return ((live, Phase.BEFORE_BACKWARD),)
        # All m microbatches are in flight before the first backward ends: gradients appear
        # only when one microbatch has been freed.
        return (
            (live, Phase.BEFORE_BACKWARD),
            (
                live_on_device(in_flight - 1, on_host=self.activations_on_host),
                Phase.AFTER_BACKWARD,
            ),
        )

    def _room(self, limit_bytes: float) -> Any:
        """What a limit leaves for live tensors."""
        return (limit_bytes - self.profile.context_bytes) / self._overhead

    @property
    def _overhead(self) -> float:
        return 1 + self.profile.allocator_overhead_fraction

    @cached_property
    def _kept(self) -> Any:
        return kept_bytes(self.load, recompute=self.recompute)

    @cached_property
    def slopes(self) -> Sequence[Resident]:
        """The sum of all parts, by phase."""
        return _sum_of_parts(tuple(PARTS.values()), self.ranks)

    def _fixed_bytes(self, phase: Phase) -> Any:
        """Bytes of all parts in a phase that do not depend on trained parameters."""
        slopes = self.slopes[phase]
        frozen_bytes = slopes.per_frozen_byte * self.load.frozen_bytes
        frozen_bytes = frozen_bytes + slopes.per_frozen_param_byte * self.load.frozen_param_bytes
        return frozen_bytes + slopes.per_batch_byte * self.batch_bytes

    @cached_property
    def resident_bytes(self) -> Sequence[Any]:
        """Bytes of all parts, by phase."""
        return [self.trained_bytes(phase) + self._fixed_bytes(phase) for phase in Phase]

    def trained_bytes(self, phase: Phase) -> Any:
        """Bytes of all parts in a phase that are of trained parameters."""
        slopes, load = self.slopes[phase], self.load
        return slopes.per_param_byte * load.param_bytes + slopes.per_spread_byte * load.spread_bytes


@lru_cache(maxsize=4096)
def _sum_of_parts(parts: tuple[Part, ...], ranks: Ranks) -> Sequence[Resident]:
    """Return the sum of parts, by phase. Kept, as a search has few kinds of ranks and needs their
    sums very often.
    """
    found = []
    for phase in Phase:
        # Of each kind of state, how many times all parts take it.
        times = State(*map(sum, zip(*(part.times(ranks, phase) for part in parts), strict=True)))
        found.append(Resident(*map(times.of, _states_per_byte(ranks))))
    return tuple(found)


def _of_spread(ranks: Ranks) -> State:
    """Return how much more state a byte of an expert's parameters is than one of others: fewer
    ranks share an expert, so each has more of it.
    """
    of_experts = ranks.of_experts
    more = State(own=1 / of_experts.shards - 1 / ranks.shards)
    # Those of which no ranks share shards are not gathered: they are whole.
    is_alone = ranks.is_sharded and not of_experts.is_sharded
    return more._replace(trained=-1, alone=1) if is_alone else more


def _states_per_byte(ranks: Ranks) -> tuple[State, ...]:
    """Return the state that is a byte of each amount of `Resident`."""
    shard = 1 / ranks.shards
    return (
        State(trained=1, own=shard),
        _of_spread(ranks),
        # With moments of tables whose gradients are rows (`block_bytes.rest_bytes`).
        State(frozen=1),
        # `frozen_bytes` has these parameters whole; sharded, they are not among whole tensors.
        State(frozen=-1, own_frozen=shard) if ranks.shards_frozen else State(),
        State(batch=1),
    )
