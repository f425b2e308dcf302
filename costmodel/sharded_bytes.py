"""What ZeRO holds beside a rank's activations, played block by block as FSDP2 does it.

Weights are gathered into one message, from which each parameter is copied; the message of a
forward stays until the next block's is copied too, that of a backward is let go at once, and the
next block's is fetched ahead. A block's gradients are copied into a message, from which the rank
gets the sum of its shard; that message stays until the next block's is made, the last gradient
until the sum is there. Blocks whose inputs need no gradient do so when the whole backward is
over. (torch 2.13, torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,
_fsdp_collectives}.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from costmodel.stage_bytes import BackwardBytes, ForwardBytes


class Unit(NamedTuple):
    """Parameters gathered together: bytes of all of them, of their gradients as autograd makes
    them and as they are summed, and of the message that takes the sums; whether an input of
    their block needs a gradient; and the last parameter's part of the gradients.
    """

    gathered_bytes: int
    gradient_bytes: int
    sum_bytes: int
    message_bytes: int
    has_input_gradient: bool
    last_part: Fraction


@dataclass(frozen=True, kw_only=True)
class ShardedStage:
    """The units of a stage: its blocks', None where one has no parameters, and that of the
    parameters that several blocks share. `shards_on_host`: gradients' shards leave the device.
    `copies_to_reduce`: a message is summed in a copy of it, as on gloo.
    """

    blocks: Sequence[Unit | None]
    shared: Unit | None
    zero_stage: int
    replicas: int
    shards_on_host: bool
    copies_to_reduce: bool

    @property
    def shard_bytes(self) -> int:
        """A rank's shards, in the dtype that gradients are summed in."""
        units = [unit for unit in (*self.blocks, self.shared) if unit is not None]
        return sum(unit.message_bytes // self.replicas for unit in units)

    @property
    def keeps_sums(self) -> bool:
        """Whether autograd adds to gradients that are there."""
        units = [unit for unit in (*self.blocks, self.shared) if unit is not None]
        return self.zero_stage == 1 and all(u.sum_bytes == u.gradient_bytes for u in units)


class _Held:
    """A set of units and the bytes they take together, kept as they come and go."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self._members: set[int] = set()
        self.num_bytes = 0

    def __contains__(self, index: int) -> bool:
        return index in self._members

    def add(self, index: int) -> None:
        """Hold a unit, if it is not held."""
        if index not in self._members:
            self._members.add(index)
            self.num_bytes += self._sizes[index]

    def discard(self, index: int) -> None:
        """Let a unit go, if it is held."""
        if index in self._members:
            self._members.remove(index)
            self.num_bytes -= self._sizes[index]

    def clear(self) -> None:
        """Let all go."""
        self._members.clear()
        self.num_bytes = 0


class ShardedBytes:
    """What FSDP2 holds of one stage now. Mutable: it is a tally.

    Units are known by their block's position; the shared one by the number of blocks.
    """

    def __init__(self, stage: ShardedStage) -> None:
        self._stage = stage
        self._shared = len(stage.blocks)
        self._units: dict[int, Unit] = {
            index: unit
            for index, unit in enumerate([*stage.blocks, stage.shared])
            if unit is not None
        }
        units = self._units.items()
        gathered = {index: unit.gathered_bytes for index, unit in units}
        self._gathered, self._fetched = _Held(gathered), _Held(gathered)
        self._forward_message: int | None = None
        self._sum_message: int | None = None
        self._summed = _Held({index: unit.sum_bytes for index, unit in units})
        self._fresh = _Held({index: unit.gradient_bytes for index, unit in units})
        self._sharded = _Held({index: self._shard_bytes(index) for index in self._units})
        self._ran: list[int] = []
        self._places: dict[int, list[int]] = {index: [] for index in self._units}
        self._base = self._peak = 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, whole and in shards."""
        whole = self._fresh.num_bytes + self._summed.num_bytes
        return whole + (0 if self._stage.shards_on_host else self._sharded.num_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of gathered weights, gradients and messages."""
        held = self._gathered.num_bytes + self._fetched.num_bytes
        if self._forward_message is not None:
            held += self._units[self._forward_message].gathered_bytes
        if self._sum_message is not None:
            held += self._units[self._sum_message].message_bytes
        return held + self.gradient_bytes

    def _shard_bytes(self, index: int) -> int:
        return self._units[index].message_bytes // self._stage.replicas

    def _note(self, more: int = 0) -> None:
        self._peak = max(self._peak, self._base + self.live_bytes + more)

    def forward(self, job: ForwardBytes) -> int:
        """Play a forward and return its height, activations counted, above its start."""
        self._base = self._peak = 0
        self._before_forward(self._shared)
        for index, turn in enumerate(job.turns):
            self._base = turn.start_bytes
            self._before_forward(index)
            self._base = turn.peak_bytes
            self._note()
            self._after_forward(index)
        self._base = job.last_bytes
        self._note()
        self._after_forward(self._shared)
        self._forward_message = None
        return self._peak

    def _before_forward(self, index: int) -> None:
        if index in self._units and index not in self._gathered:
            self._fetched.add(index)
            self._gathered.add(index)
            self._note()
            self._fetched.discard(index)
            self._forward_message = index

    def _after_forward(self, index: int) -> None:
        if index in self._units:
            if self._stage.zero_stage == 3 and index != self._shared:
                self._gathered.discard(index)
            self._places[index].append(len(self._ran))
            self._ran.append(index)

    def backward(self, job: BackwardBytes, *, is_last: bool) -> int:
        """Play a backward and return its height, activations counted, above its start; `is_last`
        is the stage's last one of a step.
        """
        self._base = self._peak = 0
        last = len(job.turns) - 1
        waiting: list[int] = []
        for back, turn in enumerate(job.turns):
            index = last - back
            self._base = turn.start_bytes
            self._before_backward(index)
            if index == last:
                self._before_backward(self._shared)
            self._base = turn.peak_bytes
            self._note()
            self._base = turn.end_bytes
            if index in self._units:
                self._make_gradient(index)
                if self._units[index].has_input_gradient:
                    self._after_backward(index, is_last)
                else:
                    waiting.insert(0, index)
        if self._shared in self._units:
            self._make_gradient(self._shared)
            self._after_backward(self._shared, is_last)
        for index in waiting:
            self._after_backward(index, is_last)
        if is_last:
            self._fetched.clear()
            self._ran.clear()
            self._places = {index: [] for index in self._units}
            self._sum_message = None
        return self._peak

    def _make_gradient(self, index: int) -> None:
        """Hold a unit's new gradients, unless they add to sums in place."""
        unit = self._units[index]
        if index not in self._summed or unit.sum_bytes != unit.gradient_bytes:
            self._fresh.add(index)

    def _before_backward(self, index: int) -> None:
        if index not in self._units:
            return
        if index not in self._gathered:
            self._fetched.add(index)
            self._gathered.add(index)
            self._note()
            self._fetched.discard(index)
        if self._places[index]:
            place = self._places[index].pop()
            before = self._ran[place - 1] if place else index
            if before not in self._gathered:
                self._fetched.add(before)

    def _after_backward(self, index: int, is_last: bool) -> None:
        self._note()
        unit = self._units[index]
        is_fresh = index in self._fresh
        if self._stage.zero_stage == 1 and not is_last:
            if unit.sum_bytes == unit.gradient_bytes:
                self._summed.add(index)
            elif is_fresh and index not in self._summed:
                self._note(unit.sum_bytes)
                self._summed.add(index)
            self._fresh.discard(index)
            return
        if index in self._summed:
            self._fresh.discard(index)
        if self._stage.zero_stage == 3 or is_last:
            self._gathered.discard(index)
        self._sum_message = index
        self._note()
        reduced = unit.sum_bytes if index in self._summed else unit.gradient_bytes
        self._fresh.discard(index)
        self._summed.discard(index)
        # The last gradient copied into the message is let go when its sum is there.
        beside = int(reduced * unit.last_part)
        beside += unit.message_bytes if self._stage.copies_to_reduce else 0
        self._note(self._shard_bytes(index) + beside)
        self._sharded.add(index)
