"""What one microbatch holds on stages of a rank, from its first job there to its last.

It is the same for every microbatch whose jobs run in the same variants, so it is simulated once:
what a microbatch holds after some jobs remembers what it holds after each job that came next.

Storages are counted by holders, as Python does: a value that the stage keeps for its backward,
that another stage of this rank reads in place, and that a message carries, is one storage with
three holders, and is freed when the last one lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from costmodel.memory.block.deferred_weights import DeferredWeight, deferred_storages, weight_job
from costmodel.memory.exact.stage.backward import backward_job
from costmodel.memory.exact.stage.jobs import JobVariant, Message, StageJobs
from costmodel.memory.exact.stage.stage_walk import (
    BackwardBytes,
    BackwardVariant,
    ForwardBytes,
    StageWalk,
)
from planner.language.schedule.jobs import JobKind

Storage = tuple[str | int, ...]
"""What names a storage of a microbatch: one that several stages see is the one of its maker."""


class Effect(NamedTuple):
    """What a job does to a rank's bytes."""

    taken_bytes: int = 0
    """At its start, so many go from receive buffers to the microbatch."""
    rise_bytes: int = 0
    """At its height, so many live beside what was there and what it has taken."""
    ahead_bytes: int | None = None
    """Or so many live before anything is received, if the job may start then."""
    kept_bytes: int = 0
    """Afterwards, so many more are kept than before ..."""
    new_gradient_bytes: int = 0
    """... and so many more are gradients of parameters."""
    done: ForwardBytes | BackwardBytes | None = None
    """The job as its stage walks it."""
    sent: tuple[tuple[Message, Storage], ...] = ()
    """What it sends to other ranks."""
    movable: tuple[int, int] | None = None
    """What could be offloaded of what a forward keeps: its own, and also kept by messages."""


class LinkedStages:
    """Stages of a rank that hand values over in place; `keeps_sent`: messages are kept (gloo)."""

    def __init__(self, stages: Mapping[int, StageJobs], *, keeps_sent: bool) -> None:
        self.stages, self.keeps_sent = stages, keeps_sent
        self._made: dict[tuple[int, str], Storage] = {}
        for index, stage in stages.items():
            for message in stage.incoming:
                if self.is_local(message):
                    maker = stages[message.other_stage]
                    # Stages are walked under names of their kind's first stage, so the two ends of
                    # an edge may call its value by different names.
                    name = next(m.name for m in maker.outgoing if m.edge == message.edge)
                    self._made[index, message.name] = "value", message.other_stage, name

    def is_local(self, message: Message) -> bool:
        """Whether the value is handed over in place."""
        return message.other_stage in self.stages

    def value(self, stage: int, name: str) -> Storage:
        """The storage of a value as a stage sees it."""
        return self._made.get((stage, name), ("value", stage, name))


class _Kept(NamedTuple):
    """What a microbatch keeps of a stage's forward."""

    own_bytes: int
    storages: Mapping[str, Storage]
    leaves: tuple[Storage, ...]  # where gradients of what arrived will be left


class MicrobatchBytes:
    """What a microbatch holds after some of its jobs: storages with their bytes and holders (some
    are under way to other ranks), what each stage's forward keeps, and deferred weight gradients.

    A value of a chain: `after` and `without` return the next one and do not change this one.
    """

    def __init__(self, linked: LinkedStages) -> None:
        self._linked = linked
        self._holders: dict[Storage, int] = {}
        self._bytes: dict[Storage, int] = {}
        self._under_way: Counter[Storage] = Counter()
        self._kept: dict[int, _Kept] = {}
        self._deferred: dict[int, tuple[tuple[DeferredWeight, ...], Sequence[Storage]]] = {}
        # A tree of states: microbatches that run the same jobs share its nodes.
        self._after: dict[JobVariant, tuple[Effect, MicrobatchBytes]] = {}
        self._without: dict[Storage, tuple[int, MicrobatchBytes]] = {}

    def after(self, variant: JobVariant) -> tuple[Effect, MicrobatchBytes]:
        """Return what a job does, and what the microbatch holds then."""
        known = self._after.get(variant)
        if known is None:
            then = self._copy()
            run = {JobKind.FORWARD: then._forward, JobKind.BACKWARD_WEIGHT: then._weights}
            known = self._after[variant] = run.get(variant.kind, then._backward)(variant), then
        return known

    def without(self, sent: Storage) -> tuple[int, MicrobatchBytes]:
        """Return the bytes that are freed when something sent has left, and what is held then."""
        if sent not in self._without:
            then = self._copy()
            then._under_way[sent] -= 1
            self._without[sent] = then._release(sent), then
        return self._without[sent]

    def _copy(self) -> MicrobatchBytes:
        then = MicrobatchBytes(self._linked)
        then._holders, then._bytes = dict(self._holders), dict(self._bytes)
        then._under_way = self._under_way.copy()
        then._kept, then._deferred = dict(self._kept), dict(self._deferred)
        return then

    def _hold(self, key: Storage, size: int) -> int:
        """Add a holder of a storage, and return the bytes that are new with that."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] > 1:
            return 0
        self._bytes[key] = size
        return size

    def _release(self, key: Storage) -> int:
        """Remove a holder of a storage, and return the bytes that are freed with that."""
        self._holders[key] -= 1
        if self._holders[key]:
            return 0
        del self._holders[key]
        return self._bytes.pop(key)

    def _receive(self, message: Message, key: Storage) -> int:
        """Take what another rank sent out of its receive buffer, and return its bytes. What a
        stage of this rank hands over in place is held since that stage's job.
        """
        return 0 if self._linked.is_local(message) else self._hold(key, message.num_bytes)

    def _hand_on(self, message: Message, key: Storage) -> int:
        """Hold what a job hands to another stage, and return the bytes that are new with that: in
        place, until that stage's job; by a message, only where senders keep it (gloo).
        """
        if not self._linked.is_local(message):
            if not self._linked.keeps_sent:
                return 0
            self._under_way[key] += 1
        return self._hold(key, message.num_bytes)

    def _forward(self, variant: JobVariant) -> Effect:
        linked, s = self._linked, variant.stage_index
        stage = linked.stages[s]
        walk: StageWalk = getattr(stage, variant.walk)
        incoming = [(message, linked.value(s, message.name)) for message in stage.incoming]
        taken_bytes = sum([self._receive(message, key) for message, key in incoming])
        done = walk.forward
        kept_bytes = taken_bytes + done.kept_bytes + stage.loss_bytes
        kept = {name: linked.value(s, name) for name in done.kept}
        for name, key in kept.items():
            kept_bytes += self._hold(key, done.kept[name])
        # A value that arrived is a leaf of the stage's graph. The executor refers to it up to the
        # backward, which leaves its gradient there, and lets other values go.
        leaves = []
        for message, key in incoming:
            if message.requires_grad:
                leaves.append(key)
                kept_bytes += self._hold(key, message.num_bytes)
            kept_bytes -= self._release(key)
        sent = []
        for message in stage.outgoing:
            key = linked.value(s, message.name)
            if not linked.is_local(message):
                # What is sent in another placement is a copy, which no graph refers to.
                key = ("copy", *key) if message.name in walk.sent_copies else key
                sent.append((message, key))
            kept_bytes += self._hand_on(message, key)
        self._kept[s] = _Kept(done.kept_bytes, kept, tuple(leaves))
        # Values made of the batch belong to all stages, so they are not offloaded. Storages of
        # messages under way are copied to the host, too, and free nothing on the device.
        held = {*kept.values(), *leaves} - {linked.value(s, name) for name in walk.side}
        there = {key for key in held if key in self._bytes}
        away = {key for key in there if self._under_way[key]}
        return Effect(
            taken_bytes=taken_bytes,
            rise_bytes=done.rise_bytes,
            kept_bytes=kept_bytes,
            done=done,
            sent=tuple(sent),
            movable=(
                done.kept_bytes + sum(self._bytes[key] for key in there - away),
                sum(self._bytes[key] for key in away),
            ),
        )

    def _backward(self, variant: JobVariant) -> Effect:
        linked, s = self._linked, variant.stage_index
        stage = linked.stages[s]
        walk: StageWalk = getattr(stage, variant.walk)
        is_split = variant.kind is JobKind.BACKWARD_INPUT and stage.sharded is None
        # The last block is recomputed before the gradients are waited for; under ZeRO its weights
        # are gathered only when its backward begins (`StageModule.take_again`).
        blocks = walk.blocks if stage.sharded is None else ()
        ahead_bytes = blocks[-1].kind.bytes.recompute_rise_bytes if blocks else 0
        arriving = [(m, ("gradient", m.edge)) for m in stage.outgoing if m.requires_grad]
        taken_bytes = sum([self._receive(message, key) for message, key in arriving])
        # What no other holder can have goes with the backward; named storages when their last
        # holder lets go.
        own_bytes, kept, leaves = self._kept.pop(s)
        how = BackwardVariant(
            received=tuple(message.name for message, _ in arriving),
            first=variant.is_first,
            num_deferred=variant.num_deferred,
            flush=not is_split,
            kept_by_others=frozenset(
                name
                for name, key in kept.items()
                if name not in walk.arriving and self._holders[key] > 1
            ),
        )
        done = backward_job(walk, how)
        kept_bytes = taken_bytes - own_bytes
        if is_split:
            # Until the job of the weight gradients: their operands, and gradients of outputs.
            deferred = []
            for name, size in deferred_storages(done.deferred).items():
                is_value = name in walk.arriving
                key = linked.value(s, name) if is_value else ("deferred", s, name)
                deferred.append(key)
                kept_bytes += self._hold(key, size)
            self._deferred[s] = done.deferred, deferred
        for key in (*kept.values(), *leaves, *(key for _, key in arriving)):
            kept_bytes -= self._release(key)
        returned = [(m, ("gradient", m.edge)) for m in stage.incoming if m.requires_grad]
        for message, key in returned:
            kept_bytes += self._hand_on(message, key)
        return Effect(
            taken_bytes=taken_bytes,
            rise_bytes=done.rise_bytes,
            ahead_bytes=ahead_bytes,
            kept_bytes=kept_bytes,
            new_gradient_bytes=done.new_gradient_bytes,
            done=done,
            sent=tuple((m, key) for m, key in returned if not linked.is_local(m)),
        )

    def _weights(self, variant: JobVariant) -> Effect:
        s = variant.stage_index
        deferred, keys = self._deferred.pop(s, ((), ()))
        rise, left = weight_job(
            deferred,
            first=variant.is_first,
            gradient_factor=self._linked.stages[s].walk.gradient_factor,
        )
        return Effect(
            rise_bytes=rise,
            kept_bytes=-sum(self._release(key) for key in keys),
            new_gradient_bytes=left,
        )
