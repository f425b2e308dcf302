"""What ZeRO holds beside a rank's activations: FSDP2, simulated block by block.

Weights are gathered into one message, from which each parameter is copied; the message of a
forward stays until the next block's is copied too, that of a backward is freed at once, and the
next block's is fetched ahead. A block's gradients are copied into a message, from which the rank
gets the sum of its shard; that message stays until the next block's is made, the last gradient
until the sum is there. Blocks whose inputs need no gradient do so when the whole backward is
over. What is sharded along another dim than the first is copied once more on either way: from the
shards that were gathered into one tensor, and into a row of shards before it is summed. Units
without a trained parameter are gathered like others and have no message of gradients; blocks that
no gradient reaches gather nothing in the backward. (torch 2.13,
torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives}.py.)
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

from costmodel.memory.exact.stage.fsdp_units import ShardedStage, Unit
from costmodel.memory.exact.stage.stage_walk import BackwardBytes, ForwardBytes


class FsdpState(NamedTuple):
    """What FSDP2 holds of a stage between two jobs. Units go by key of `ShardedStage.units`."""

    gathered: frozenset[int] = frozenset()
    """Units whose weights are gathered."""
    prefetched: frozenset[int] = frozenset()
    """Units whose message of weights has arrived for a later block."""
    summed: frozenset[int] = frozenset()
    """Units whose whole gradients are summed over microbatches (ZeRO 1)."""
    fresh: frozenset[int] = frozenset()
    """Units whose whole gradients are as autograd made them."""
    sharded: frozenset[int] = frozenset()
    """Units whose gradients are in shards."""
    sum_message: int | None = None
    """The unit whose reduce-scatter message is still alive."""
    live_bytes: int = 0
    """All of that together."""
    gradient_bytes: int = 0
    """Its gradients alone."""
    weight_bytes: int = 0
    """Its whole weights alone, and the messages that they arrive in."""


class FsdpHeight(NamedTuple):
    """The height of one job of a stage."""

    peak_bytes: int
    """All of the stage, activations included, above the job's start."""
    weight_bytes: int
    """Part of it that is whole weights, and the messages that they arrive in."""


class ShardedBytes:
    """What FSDP2 holds of one stage now. Mutable: it is a tally.

    A job that starts where one like it has started does what that did: the stage remembers.
    """

    def __init__(self, stage: ShardedStage) -> None:
        self._stage = stage
        self._in_flight = 0
        self._ran_back = False
        self.state = FsdpState()
        if stage.sums_stay:
            sums = sum(unit.sum_bytes for unit in stage.units.values())
            self.state = FsdpState(
                summed=frozenset(stage.units), live_bytes=sums, gradient_bytes=sums
            )

    def run(self, job: ForwardBytes | BackwardBytes, *, is_last: bool = False) -> FsdpHeight:
        """Simulate a job and return its height; `is_last` is the stage's last backward of a
        step.
        """
        is_first = False
        if isinstance(job, ForwardBytes):
            self._in_flight += 1
        else:
            # FSDP2 lists units in the order of all forwards and takes the latest entry at each
            # backward, to prefetch the entry before it. Only ahead of the step's first forward
            # there is none; its entry is taken when no other microbatch is left in flight.
            is_first = self._in_flight == 1 and not self._ran_back
            self._ran_back = (self._ran_back or is_first) and not is_last
            self._in_flight -= 1
        # A job's height follows from these alone; microbatches in the steady state repeat them.
        key = job, self.state, is_last, is_first
        simulated = self._stage.simulated
        if key not in simulated:
            tally = _FsdpTally(self._stage, self.state)
            if isinstance(job, ForwardBytes):
                tally.forward(job)
            else:
                tally.backward(job, is_last=is_last, is_first=is_first)
            simulated[key] = tally.height, tally.state()
        height, self.state = simulated[key]
        return height


class _Held:
    """Some units of a stage, and the bytes that a part of each takes together. Mutable."""

    def __init__(self, units: Mapping[int, Unit], part: str, members: frozenset[int]) -> None:
        self._units, self._bytes_of = units, attrgetter(part)
        self.members = set(members)
        self.num_bytes = sum([self._bytes_of(units[index]) for index in members])

    def __contains__(self, index: int) -> bool:
        return index in self.members

    def add(self, index: int) -> None:
        """Add a unit."""
        if index not in self.members:
            self.members.add(index)
            self.num_bytes += self._bytes_of(self._units[index])

    def discard(self, index: int) -> None:
        """Remove a unit, if it is there."""
        if index in self.members:
            self.members.remove(index)
            self.num_bytes -= self._bytes_of(self._units[index])


class _FsdpTally:
    """One job from what is held at its start to what is at its end. Mutable: it is a tally."""

    def __init__(self, stage: ShardedStage, state: FsdpState) -> None:
        self._stage = stage
        self._shared, self._units = stage.shared, stage.units
        self._gathered = _Held(stage.units, "gathered_bytes", state.gathered)
        self._prefetched = _Held(stage.units, "gathered_bytes", state.prefetched)
        self._summed = _Held(stage.units, "sum_bytes", state.summed)
        self._fresh = _Held(stage.units, "gradient_bytes", state.fresh)
        self._sharded = _Held(stage.units, "shard_bytes", state.sharded)
        self._sum_message = state.sum_message
        self._forward_message: int | None = None
        self._base = 0
        self.height = FsdpHeight(0, 0)

    def state(self) -> FsdpState:
        """Return what is held when the job has ended."""
        self._forward_message = None  # freed with the forward
        return FsdpState(
            gathered=frozenset(self._gathered.members),
            prefetched=frozenset(self._prefetched.members),
            summed=frozenset(self._summed.members),
            fresh=frozenset(self._fresh.members),
            sharded=frozenset(self._sharded.members),
            sum_message=self._sum_message,
            live_bytes=self._live_bytes,
            gradient_bytes=self._gradient_bytes,
            weight_bytes=self._weight_bytes,
        )

    @property
    def _gradient_bytes(self) -> int:
        whole = self._fresh.num_bytes + self._summed.num_bytes
        return whole + (0 if self._stage.shards_on_host else self._sharded.num_bytes)

    @property
    def _weight_bytes(self) -> int:
        whole = self._gathered.num_bytes + self._prefetched.num_bytes
        if self._forward_message is not None:
            whole += self._units[self._forward_message].gathered_bytes
        return whole

    @property
    def _live_bytes(self) -> int:
        held = self._weight_bytes
        if self._sum_message is not None:
            held += self._units[self._sum_message].message_bytes
        return held + self._gradient_bytes

    def _note(self, more: int = 0) -> None:
        """Note what is alive now, activations and some bytes more included."""
        peak_bytes = self._base + self._live_bytes + more
        if peak_bytes > self.height.peak_bytes:
            self.height = FsdpHeight(peak_bytes, self._weight_bytes)

    def forward(self, job: ForwardBytes) -> None:
        """Simulate a forward."""
        # Parameters of several blocks are the unit of the stage around them, which is called first.
        self._before_forward(self._shared)
        for index, sample in enumerate(job.samples):
            self._base = sample.start_bytes
            self._before_forward(index)
            self._base = sample.peak_bytes
            self._note()
            # ZeRO 3 frees weights after each block; the shared unit serves blocks to come.
            if self._stage.zero_stage == 3:
                self._gathered.discard(index)
        self._base = job.last_bytes
        self._note()

    def _before_forward(self, index: int) -> None:
        if index in self._units and index not in self._gathered:
            # The message and the parameters copied from it are alive together. The message lives
            # on until the next unit's parameters are copied.
            self._gather(index)
            self._forward_message = index

    def _gather(self, index: int) -> None:
        self._prefetched.add(index)
        self._gathered.add(index)
        self._note(self._units[index].turned_bytes)
        self._prefetched.discard(index)

    def backward(self, job: BackwardBytes, *, is_last: bool, is_first: bool) -> None:
        """Simulate a backward; `is_first` is that of the stage's first forward in a step."""
        last = len(job.samples) - 1
        waiting: list[int] = []
        for back, sample in enumerate(job.samples):
            index = last - back
            self._base = sample.start_bytes
            self._before_backward(index, is_first)
            if index == last:
                self._before_backward(self._shared, is_first)
            self._base = sample.peak_bytes
            self._note()
            self._base = sample.end_bytes
            if index in self._units:
                if self._units[index].has_backward:
                    self._make_gradient(index)
                if self._units[index].has_input_gradient:
                    self._after_backward(index, is_last)
                else:
                    waiting.insert(0, index)
        if self._shared in self._units:
            self._make_gradient(self._shared)
            self._after_backward(self._shared, is_last)
        # These blocks have no hook on an input's gradient, so FSDP2 reduces them at the backward's
        # end.
        for index in waiting:
            self._after_backward(index, is_last)
        if self._stage.adds_late:
            for index in list(self._fresh.members):
                self._fresh.discard(index)
        if is_last:
            # At the end of a step FSDP2 waits for all messages and frees them.
            for index in list(self._prefetched.members):
                self._prefetched.discard(index)
            self._sum_message = None

    def _make_gradient(self, index: int) -> None:
        """Hold a unit's new gradients, unless they add to sums in place."""
        unit = self._units[index]
        # Autograd adds in place only where the sum has the gradients' dtype.
        if index not in self._summed or unit.sum_bytes != unit.gradient_bytes:
            self._fresh.add(index)

    def _before_backward(self, index: int, is_first: bool) -> None:
        if index not in self._units or not self._units[index].has_backward:
            return
        if index not in self._gathered:
            self._gather(index)
        # The unit that runs backward next is prefetched: FSDP2 expects the reverse of the forward.
        before = self._stage.ran_before[index]
        if before not in self._gathered and not (is_first and before >= index):
            self._prefetched.add(before)

    def _after_backward(self, index: int, is_last: bool) -> None:
        self._note()
        unit = self._units[index]
        is_fresh = index in self._fresh
        if self._stage.sums_stay:
            # Each is added to its sum, and at the end of a step the sums are summed in place.
            if not self._stage.adds_late:
                self._fresh.discard(index)
            return
        if self._stage.zero_stage == 1 and not is_last:
            # ZeRO 1 reduces once a step: whole gradients are summed, in fp32 if they are bf16.
            if unit.sum_bytes == unit.gradient_bytes:
                self._summed.add(index)
            # The first sum is a cast copy: the bf16 gradient is alive beside it.
            elif is_fresh and index not in self._summed:
                self._note(unit.sum_bytes)
                self._summed.add(index)
            self._fresh.discard(index)
            return
        if index in self._summed:
            self._fresh.discard(index)
        # ZeRO 1 and 2 keep weights gathered for the microbatches to come.
        if self._stage.zero_stage == 3 or is_last:
            self._gathered.discard(index)
        if not unit.gradient_bytes:
            self._sum_message = None  # waited for, and no message follows
            return
        # Gradients are copied into the message of the reduce-scatter; the message before is freed.
        self._sum_message = index
        reduced = unit.sum_bytes if index in self._summed else unit.gradient_bytes
        self._note(int(reduced * unit.turned_part))
        self._fresh.discard(index)
        self._summed.discard(index)
        # The last gradient copied into the message is freed when its sum is there.
        beside = int(reduced * unit.last_part)
        beside += unit.message_bytes if self._stage.copies_to_reduce else 0
        self._note(unit.shard_bytes + beside)
        self._sharded.add(index)
