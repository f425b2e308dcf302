"""What one microbatch holds on stages of a rank, from its first job there to its last.

It is the same for every microbatch that goes the same way, so it is played once: what a microbatch
holds after some jobs remembers what it holds after each job that came next. Where a stage hands
nothing over in place, that is so for all stages of its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from costmodel.memory.block.backward_walk import Aside
from costmodel.memory.block.deferred_weights import held_aside, weight_job
from costmodel.memory.exact.stage_jobs import Message, StageJobs, Way
from costmodel.memory.exact.stage_walk import BackwardBytes, ForwardBytes
from planner.schedule.jobs import JobKind

Storage = tuple[str | int, ...]
"""What names a storage of a microbatch: one that several stages see is the one of its maker."""


class Effect(NamedTuple):
    """What a job does to a rank's bytes: at its start `taken_bytes` go from receive buffers to
    the microbatch, at its height `height_bytes` more are kept than before and `rise_bytes` live
    beside those, or `ahead_bytes` before anything is received, if it may; afterwards
    `kept_bytes` more are kept than before, and `left_bytes` more are gradients. `done` is the job
    as its stage walks it, `movable` what could go to the host of what a forward keeps: of its own,
    and also kept by messages under way.
    """

    taken_bytes: int
    height_bytes: int
    rise_bytes: int
    ahead_bytes: int | None
    kept_bytes: int
    left_bytes: int
    done: ForwardBytes | BackwardBytes | None
    sent: tuple[tuple[Message, Storage], ...] = ()
    movable: tuple[int, int] | None = None


class LinkedStages:
    """Stages of a rank that hand values over in place, and who sees what of whom; all others are
    elsewhere. `keeps_sent`: what is sent is held until it is let go (`MicrobatchBytes.without`).
    """

    def __init__(self, stages: Mapping[int, StageJobs], *, keeps_sent: bool) -> None:
        self.stages, self.keeps_sent = stages, keeps_sent
        self._made: dict[tuple[int, str], Storage] = {}
        for index, stage in stages.items():
            for message in stage.incoming:
                if self.is_local(message):
                    maker = stages[message.other_stage]
                    name = next(m.name for m in maker.outgoing if m.tensor == message.tensor)
                    self._made[index, message.name] = "value", message.other_stage, name

    def is_local(self, message: Message) -> bool:
        """Whether the value is handed over in place."""
        return message.other_stage in self.stages

    def value(self, stage: int, name: str) -> Storage:
        """The storage of a value as a stage sees it."""
        return self._made.get((stage, name), ("value", stage, name))


class _Kept(NamedTuple):
    """What a microbatch keeps of a stage's forward: bytes, storages by name, and the leaves
    where gradients of what arrived will be left.
    """

    own_bytes: int
    storages: Mapping[str, Storage]
    leaves: tuple[Storage, ...]


class MicrobatchBytes:
    """What a microbatch holds after some of its jobs: storages with their bytes and how many
    hold each, of which some are `under_way` to other ranks; what each stage's forward keeps, and
    what weight gradients put aside.
    """

    def __init__(self, linked: LinkedStages) -> None:
        self._linked = linked
        self._holders: dict[Storage, int] = {}
        self._bytes: dict[Storage, int] = {}
        self._under_way: Counter[Storage] = Counter()
        self._kept: dict[int, _Kept] = {}
        self._aside: dict[int, tuple[tuple[Aside, ...], list[Storage]]] = {}
        self._after: dict[Way, tuple[Effect, MicrobatchBytes]] = {}
        self._without: dict[Storage, tuple[int, MicrobatchBytes]] = {}

    def after(self, way: Way) -> tuple[Effect, MicrobatchBytes]:
        """Return what a job does, and what the microbatch holds then."""
        known = self._after.get(way)
        if known is None:
            then = self._copy()
            run = {JobKind.FORWARD: then._forward, JobKind.BACKWARD_WEIGHT: then._weights}
            known = self._after[way] = run.get(way.kind, then._backward)(way), then
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
        then._kept, then._aside = dict(self._kept), dict(self._aside)
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

    def _forward(self, way: Way) -> Effect:
        linked, s = self._linked, way.stage_index
        stage, value = linked.stages[s], linked.value
        walk = getattr(stage, way.walk)
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
            ahead_bytes=None,
            kept_bytes=kept_bytes + done.kept_bytes + stage.loss_bytes,
            left_bytes=0,
            done=done,
            sent=tuple(sent),
            movable=(
                done.kept_bytes + sum(self._bytes[key] for key in there - away),
                sum(self._bytes[key] for key in away),
            ),
        )

    def _backward(self, way: Way) -> Effect:
        linked, s = self._linked, way.stage_index
        stage = linked.stages[s]
        walk = getattr(stage, way.walk)
        is_split = way.kind is JobKind.BACKWARD_INPUT and stage.sharded is None
        # The last block is run again before the gradients are waited for.
        blocks = walk.blocks if stage.sharded is None else ()
        ahead_bytes = blocks[-1].kind.bytes.second_rise_bytes if blocks else 0
        arriving = [message for message in stage.outgoing if message.requires_grad]
        kept_bytes = taken_bytes = 0
        for message in arriving:
            if not linked.is_local(message):
                taken_bytes += message.sent_bytes
                kept_bytes += self._hold(_gradient(s, message), message.sent_bytes)
        own_bytes, kept, leaves = self._kept.pop(s)
        done = walk.backward(
            {message.name: message.sent_bytes for message in arriving},
            first=way.is_first,
            num_aside=way.num_aside,
            flush=not is_split,
            sharded=stage.sharded is not None,
            staying=frozenset(
                name
                for name, key in kept.items()
                if name not in stage.walk.arriving and self._holders[key] > 1
            ),
        )
        height_bytes = kept_bytes
        if is_split:
            waiting: list[tuple[Storage, int]] = [
                (linked.value(s, name) if name in stage.walk.arriving else ("aside", s, name), size)
                for name, size in held_aside(done.aside).items()
            ]
            for key, size in waiting:
                kept_bytes += self._hold(key, size)
            self._aside[s] = done.aside, [key for key, _ in waiting]
        kept_bytes -= own_bytes
        for key in (*kept.values(), *leaves):
            kept_bytes -= self._release(key)
        for message in arriving:
            kept_bytes -= self._release(_gradient(s, message))
        sent: list[tuple[Message, Storage]] = []
        for message in stage.incoming:
            if message.requires_grad and linked.is_local(message):
                key = "gradient", message.other_stage, s, message.tensor
                kept_bytes += self._hold(key, message.taken_bytes)
            elif message.requires_grad:
                key = "sent", s, message.name
                kept_bytes += self._send(key, message.taken_bytes)
                sent.append((message, key))
        return Effect(
            taken_bytes=taken_bytes,
            height_bytes=height_bytes,
            rise_bytes=done.rise_bytes,
            ahead_bytes=ahead_bytes,
            kept_bytes=kept_bytes,
            left_bytes=done.left_bytes,
            done=done,
            sent=tuple(sent),
        )

    def _weights(self, way: Way) -> Effect:
        s = way.stage_index
        aside, keys = self._aside.pop(s, ((), []))
        rise, left = weight_job(aside, first=way.is_first, wide=self._linked.stages[s].walk.wide)
        return Effect(
            taken_bytes=0,
            height_bytes=0,
            rise_bytes=rise,
            ahead_bytes=None,
            kept_bytes=-sum(self._release(key) for key in keys),
            left_bytes=left,
            done=None,
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
        if any(one.other_stage in stages for one in (*stage.incoming, *stage.outgoing))
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


def _gradient(stage: int, message: Message) -> Storage:
    """The gradient of what a stage sent."""
    return "gradient", stage, message.other_stage, message.tensor
