"""What one microbatch holds on stages of a rank, from its first job there to its last.

It is the same for every microbatch whose jobs run in the same variants, so it is simulated once:
what a microbatch holds after some jobs remembers what it holds after each job that came next.
Where a stage hands nothing over in place, that holds for all stages of its kind.

Storages are counted by holders, as Python does: a value that the stage keeps for its backward,
that another stage of this rank reads in place, and that a message carries, is one storage with
three holders, and is freed when the last one lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from costmodel.memory.block.deferred_weights import DeferredWeight, deferred_storages, weight_job
from costmodel.memory.exact.stage.backward import backward_job
from costmodel.memory.exact.stage.jobs import JobVariant, Message, StageJobs
from costmodel.memory.exact.stage.stage_walk import BackwardBytes, BackwardVariant, ForwardBytes
from planner.schedule.jobs import JobKind

Storage = tuple[str | int, ...]
"""What names a storage of a microbatch: one that several stages see is the one of its maker."""


class Effect(NamedTuple):
    """What a job does to a rank's bytes."""

    taken_bytes: int = 0
    """At its start, so many go from receive buffers to the microbatch."""
    height_bytes: int = 0
    """At its height, so many more are kept than before ..."""
    rise_bytes: int = 0
    """... and so many live beside those."""
    ahead_bytes: int | None = None
    """Or so many live before anything is received, if the job may begin then."""
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
        self._deferred: dict[int, tuple[tuple[DeferredWeight, ...], list[Storage]]] = {}
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
        """Return the bytes that are let go when something sent has left, and what is held then."""
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
        """Hold a storage, and return the bytes that are there now and were not before."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] > 1:
            return 0
        self._bytes[key] = size
        return size

    def _release(self, key: Storage) -> int:
        """Hold a storage no longer, and return the bytes that are gone with that."""
        self._holders[key] -= 1
        if self._holders[key]:
            return 0
        del self._holders[key]
        return self._bytes.pop(key)

    def _send(self, key: Storage, size: int) -> int:
        if not self._linked.keeps_sent:
            return 0
        self._under_way[key] += 1
        return self._hold(key, size)

    def _forward(self, variant: JobVariant) -> Effect:
        linked, s = self._linked, variant.stage_index
        stage, value = linked.stages[s], linked.value
        walk = getattr(stage, variant.walk)
        kept_bytes = taken_bytes = 0
        for message in stage.incoming:
            if not linked.is_local(message):
                taken_bytes += message.taken_bytes
                kept_bytes += self._hold(value(s, message.name), message.taken_bytes)
        done = walk.forward
        height_bytes = kept_bytes
        kept = {name: value(s, name) for name in done.kept}
        for name, key in kept.items():
            kept_bytes += self._hold(key, done.kept[name])
        leaves = []
        for message in stage.incoming:
            key = value(s, message.name)
            if message.requires_grad:
                kept_bytes += self._hold(key, message.taken_bytes)
                leaves.append(key)
            kept_bytes -= self._release(key)
        sent = []
        for message in stage.outgoing:
            key = value(s, message.name)
            if linked.is_local(message):
                kept_bytes += self._hold(key, message.sent_bytes)
                continue
            key = ("copy", *key) if message.name in walk.sent_copies else key
            kept_bytes += self._send(key, message.sent_bytes)
            sent.append((message, key))
        self._kept[s] = _Kept(done.kept_bytes, kept, tuple(leaves))
        held = {*kept.values(), *leaves} - {value(s, name) for name in walk.side}
        there = {key for key in held if key in self._bytes}
        away = {key for key in there if self._under_way[key]}
        return Effect(
            taken_bytes=taken_bytes,
            height_bytes=height_bytes,
            rise_bytes=done.rise_bytes,
            kept_bytes=kept_bytes + done.kept_bytes + stage.loss_bytes,
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
        walk = getattr(stage, variant.walk)
        is_split = variant.kind is JobKind.BACKWARD_INPUT and stage.sharded is None
        # The last block is run again before the gradients are waited for.
        blocks = walk.blocks if stage.sharded is None else ()
        ahead_bytes = blocks[-1].kind.bytes.recompute_rise_bytes if blocks else 0
        arriving = [message for message in stage.outgoing if message.requires_grad]
        kept_bytes = taken_bytes = 0
        for message in arriving:
            if not linked.is_local(message):
                taken_bytes += message.sent_bytes
                kept_bytes += self._hold(("gradient", message.edge), message.sent_bytes)
        own_bytes, kept, leaves = self._kept.pop(s)
        how = BackwardVariant(
            received=tuple(message.name for message in arriving),
            first=variant.is_first,
            num_deferred=variant.num_deferred,
            flush=not is_split,
            kept_by_others=frozenset(
                name
                for name, key in kept.items()
                if name not in stage.walk.arriving and self._holders[key] > 1
            ),
        )
        done = backward_job(walk, how)
        height_bytes = kept_bytes
        if is_split:
            waiting: list[tuple[Storage, int]] = [
                (
                    linked.value(s, name) if name in stage.walk.arriving else ("deferred", s, name),
                    size,
                )
                for name, size in deferred_storages(done.deferred).items()
            ]
            for key, size in waiting:
                kept_bytes += self._hold(key, size)
            self._deferred[s] = done.deferred, [key for key, _ in waiting]
        kept_bytes -= own_bytes
        for key in (*kept.values(), *leaves):
            kept_bytes -= self._release(key)
        for message in arriving:
            kept_bytes -= self._release(("gradient", message.edge))
        sent: list[tuple[Message, Storage]] = []
        for message in stage.incoming:
            if not message.requires_grad:
                continue
            key = "gradient", message.edge
            if linked.is_local(message):
                kept_bytes += self._hold(key, message.taken_bytes)
            else:
                kept_bytes += self._send(key, message.taken_bytes)
                sent.append((message, key))
        return Effect(
            taken_bytes=taken_bytes,
            height_bytes=height_bytes,
            rise_bytes=done.rise_bytes,
            ahead_bytes=ahead_bytes,
            kept_bytes=kept_bytes,
            new_gradient_bytes=done.new_gradient_bytes,
            done=done,
            sent=tuple(sent),
        )

    def _weights(self, variant: JobVariant) -> Effect:
        s = variant.stage_index
        deferred, keys = self._deferred.pop(s, ((), []))
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


def before_any_job(
    stages: Mapping[int, StageJobs], *, keeps_sent: bool
) -> dict[int, tuple[int, int, MicrobatchBytes]]:
    """Return, for each stage of a rank, which of them it shares microbatches' bytes with (by the
    first), what it is called there, and what a microbatch holds at first.
    """
    linked = {
        index: stage
        for index, stage in stages.items()
        if any(end.other_stage in stages for end in (*stage.incoming, *stage.outgoing))
    }
    first = min(linked, default=0)
    together = MicrobatchBytes(LinkedStages(linked, keeps_sent=keeps_sent))
    found = {index: (first, index, together) for index in linked}
    for index, stage in stages.items():
        if index not in linked and keeps_sent:
            alone = MicrobatchBytes(LinkedStages({index: stage}, keeps_sent=True))
            found[index] = index, index, alone
        elif index not in linked:
            if not stage.alone:
                only = LinkedStages({index: stage}, keeps_sent=False)
                stage.alone.append((index, MicrobatchBytes(only)))
            found[index] = index, *stage.alone[0]
    return found
