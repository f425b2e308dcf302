"""The bytes of one rank over a step: its row of the job table, played as the executor does.

What is alive at any moment of a step: what is there all the time; gradients, from the first
backward on where they have no place of their own; for each microbatch in flight what its
forward kept; receive buffers, posted a few jobs ahead; values on their way between stages of
the same rank, handed over in place; and the height of the job that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.arrivals import Arrival, Receives, Traffic
from costmodel.backward_walk import Aside
from costmodel.sharded_bytes import ShardedBytes, ShardedStage
from costmodel.stage_bytes import BackwardBytes, ForwardBytes, StageWalk, held_aside, weight_job
from planner.schedule.jobs import Job, JobKind
from planner.schedule.trips import trips


class Message(NamedTuple):
    """A value that a stage takes from another, or hands on: its name, bytes as it lies on the
    consumer and on the producer, the other stage, and whether its gradient comes back.
    """

    name: str
    taken_bytes: int
    sent_bytes: int
    other_stage: int
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class StageJobs:
    """The jobs of one stage: `last` walks the step's last microbatch, which may not be
    recomputed, `first_aside` and `all_aside` those whose first block, or all, puts its weight
    gradients aside. `accumulates` tells that gradients have their place from the start. With
    `sends_first` a full backward puts weight gradients aside until the gradients that another
    rank waits for have left: those of its first block, in the stage's last backward all.
    `on_host` sends to the host what a microbatch keeps, where its wait is long enough. A
    microbatch's loss has `loss_bytes`. With `sharded` gradients are FSDP2's, as messages are.
    """

    walk: StageWalk
    last: StageWalk
    first_aside: StageWalk
    all_aside: StageWalk
    incoming: Sequence[Message]
    outgoing: Sequence[Message]
    accumulates: bool
    sends_first: bool
    on_host: bool
    loss_bytes: int
    sharded: ShardedStage | None = None


class Moment(NamedTuple):
    """One job with the bytes alive at its end and at its height, above what is always there;
    at the height those kept for backward, in gradients, and in buffers. `host_bytes` are the
    activations on the host then.
    """

    name: str
    end_bytes: int
    peak_bytes: int
    kept_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    host_bytes: int

    def holding(self, more_bytes: int) -> Moment:
        """Return the moment with more kept all the time."""
        return self._replace(
            end_bytes=self.end_bytes + more_bytes,
            peak_bytes=self.peak_bytes + more_bytes,
            kept_bytes=self.kept_bytes + more_bytes,
        )


def walk_rank(
    row: Sequence[Job],
    stages: Mapping[int, StageJobs],
    home: Callable[[int], int],
    here: int,
    *,
    receive_ahead: int,
    traffic: Traffic | None = None,
) -> list[Moment]:
    """Return a moment for each job of a rank; `home` gives the pp rank of a stage.

    Receives are posted `receive_ahead` jobs ahead. Without `traffic` they are posted in the order
    of need, and what is sent has left at once.
    """
    play = _Play(stages, home, here, traffic or Traffic())
    last = {job.stage_index: job for job in row if job.kind is JobKind.FORWARD}
    play.last_microbatch = {stage: job.microbatch_index for stage, job in last.items()}
    makes = (JobKind.FULL_BACKWARD, JobKind.BACKWARD_WEIGHT)
    play.last_gradients = frozenset(
        {job.stage_index: job for job in row if job.kind in makes}.values()
    )
    play.split = frozenset(
        (job.stage_index, job.microbatch_index) for job in row if job.kind is JobKind.BACKWARD_INPUT
    )
    play.last_full = frozenset(
        (job.stage_index, job.microbatch_index) for job in play.last_gradients
    )
    play.last_backwards = frozenset(
        {
            job.stage_index: job
            for job in row
            if job.kind not in (JobKind.FORWARD, JobKind.BACKWARD_WEIGHT)
        }.values()
    )
    travels = trips(row, [index for index, stage in stages.items() if stage.on_host])
    for job in row[:receive_ahead]:
        play.post(job)
    moments = []
    for position, job in enumerate(row):
        if position + receive_ahead < len(row):
            play.post(row[position + receive_ahead])
        for trip in travels:
            place = trip.stage_index, trip.microbatch_index
            if position == trip.leaving:
                play.host_bytes += sum(play.movable[place])
            if position == trip.leaving + 1:
                play.away_bytes += play.movable[place][0]
            if position == trip.arriving:
                play.away_bytes -= play.movable[place][0]
        # What leaves gets its place there before what has come back gives up its own.
        host_bytes = play.host_bytes
        for trip in travels:
            if position == trip.arriving + 1:
                place = trip.stage_index, trip.microbatch_index
                play.host_bytes -= sum(play.movable[place])
        moments.append(play.run(job)._replace(host_bytes=host_bytes))
    return moments


class _Play:
    """Bytes alive now. Mutable: it is a tally.

    A storage is known by a key and lives as long as somebody holds it.
    """

    def __init__(
        self,
        stages: Mapping[int, StageJobs],
        home: Callable[[int], int],
        here: int,
        traffic: Traffic,
    ) -> None:
        self._stages, self._home, self._here = stages, home, here
        self._traffic, self._receives = traffic, Receives(traffic)
        self._leaving: list[tuple[int, Arrival, tuple]] = []
        self._arriving_bytes = {
            (message.other_stage, index, message.name, False): message.taken_bytes
            for index, stage in stages.items()
            for message in stage.incoming
        } | {
            (index, message.other_stage, message.name, True): message.sent_bytes
            for index, stage in stages.items()
            for message in stage.outgoing
        }
        self.last_microbatch: Mapping[int, int] = {}
        self.last_gradients: frozenset[Job] = frozenset()
        self.split: frozenset[tuple[int, int]] = frozenset()
        self.last_full: frozenset[tuple[int, int]] = frozenset()
        self.last_backwards: frozenset[Job] = frozenset()
        self._sharded = {
            index: ShardedBytes(stage.sharded)
            for index, stage in stages.items()
            if stage.sharded is not None
        }
        # What a microbatch keeps: of its own, and also kept by a message under way.
        self.movable: dict[tuple[int, int], tuple[int, int]] = {}
        self.away_bytes = self.host_bytes = 0
        self._holders: dict[tuple, int] = {}
        self._bytes: dict[tuple, int] = {}
        self._kept = self._buffers = self._gradients = 0
        self._own: dict[tuple[int, int], tuple[int, dict[str, tuple], list[tuple]]] = {}
        self._aside: dict[tuple[int, int], tuple[tuple[Aside, ...], list[tuple]]] = {}
        self._forwards: dict[int, ForwardBytes] = {}
        self._backwards: dict[tuple, BackwardBytes] = {}
        self._begun: set[int] = set()
        self._weights_begun: set[int] = set()

    @property
    def _live(self) -> int:
        sharded = sum(one.live_bytes for one in self._sharded.values())
        return self._kept + self._buffers + self._gradients + sharded

    def _hold(self, key: tuple, size: int) -> None:
        if key not in self._holders:
            self._holders[key], self._bytes[key] = 0, size
            self._kept += size
        self._holders[key] += 1

    def _release(self, key: tuple) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._kept -= self._bytes.pop(key)

    def _is_local(self, message: Message) -> bool:
        return self._home(message.other_stage) == self._here

    def _value(self, stage: int, name: str, microbatch: int) -> tuple:
        """The storage of a value as a stage sees it: handed over in place, its maker's."""
        for message in self._stages[stage].incoming:
            if message.name == name:
                if self._is_local(message):
                    return self._value(message.other_stage, name, microbatch)
                return "value", stage, name, microbatch
        return "value", stage, name, microbatch

    def post(self, job: Job) -> None:
        """Make the receive buffers of a job."""
        if job.kind is JobKind.BACKWARD_WEIGHT:
            return
        stage, s = self._stages[job.stage_index], job.stage_index
        is_grad = job.kind is not JobKind.FORWARD
        for message in stage.outgoing if is_grad else stage.incoming:
            if self._is_local(message) or (is_grad and not message.requires_grad):
                continue
            wanted = _arrival(s, message, job.microbatch_index, comes=True, is_grad=is_grad)
            source = self._home(message.other_stage)
            for posted in self._receives.expect(source, wanted):
                self._buffers += self._arriving_bytes[posted[:4]]

    def run(self, job: Job) -> Moment:
        """Run a job."""
        run = {
            JobKind.FORWARD: self._forward,
            JobKind.BACKWARD_WEIGHT: self._weights,
        }.get(job.kind, self._backward)
        sharded = sum(one.gradient_bytes for one in self._sharded.values())
        beside = sum(
            one.live_bytes for index, one in self._sharded.items() if index != job.stage_index
        )
        rise, kept, gradients, buffers = run(job)
        gradients += sharded
        rise += beside - sharded
        kept -= self.away_bytes
        return Moment(
            name=f"{job.kind}{job.stage_index}.{job.microbatch_index}",
            end_bytes=self._live - self.away_bytes,
            peak_bytes=kept + gradients + buffers + rise,
            kept_bytes=kept,
            gradient_bytes=gradients,
            buffer_bytes=buffers,
            host_bytes=self.host_bytes,
        )

    def _get(self, job: Job, message: Message, *, is_grad: bool) -> None:
        """Let go what its sender took before it sent a message."""
        if not self._leaving:
            return
        source = self._home(message.other_stage)
        got = _arrival(job.stage_index, message, job.microbatch_index, comes=True, is_grad=is_grad)
        made_at = self._traffic.made_at[got]
        for leaving in [*self._leaving]:
            target, sent, key = leaving
            if target == source and self._traffic.taken_at[sent] <= made_at:
                self._leaving.remove(leaving)
                self._release(key)

    def _put(self, job: Job, message: Message, key: tuple, size: int, *, is_grad: bool) -> None:
        """Keep what is sent, where it is kept."""
        sent = _arrival(
            job.stage_index, message, job.microbatch_index, comes=False, is_grad=is_grad
        )
        if sent in self._traffic.taken_at:
            self._hold(key, size)
            self._leaving.append((self._home(message.other_stage), sent, key))

    def _walk(self, job: Job) -> StageWalk:
        stage = self._stages[job.stage_index]
        place = job.stage_index, job.microbatch_index
        if stage.last is not stage.walk and self.last_microbatch[place[0]] == place[1]:
            return stage.last
        if stage.sharded is None and (stage.sends_first or place in self.split):
            ends = place in self.split or place in self.last_full
            return stage.all_aside if ends else stage.first_aside
        return stage.walk

    def _forward_bytes(self, walk: StageWalk) -> ForwardBytes:
        key = id(walk)
        if key not in self._forwards:
            self._forwards[key] = walk.forward()
        return self._forwards[key]

    def _backward_bytes(
        self, job: Job, received: Mapping[str, int], *, first: bool, staying: frozenset[str]
    ) -> BackwardBytes:
        walk, stage = self._walk(job), self._stages[job.stage_index]
        sharded = stage.sharded is not None
        split = job.kind is JobKind.BACKWARD_INPUT and not sharded
        num_aside = len(walk.blocks) if split or job in self.last_gradients else 1
        if not split and not stage.sends_first:
            num_aside = 0
        key = id(walk), first, num_aside, split, staying
        if key not in self._backwards:
            self._backwards[key] = walk.backward(
                received,
                first=first,
                num_aside=num_aside,
                flush=not split,
                sharded=sharded,
                staying=staying,
            )
        return self._backwards[key]

    def _forward(self, job: Job) -> tuple[int, int, int, int]:
        s, m = job.stage_index, job.microbatch_index
        stage = self._stages[s]
        for message in stage.incoming:
            if not self._is_local(message):
                self._get(job, message, is_grad=False)
                self._buffers -= message.taken_bytes
                self._hold(self._value(s, message.name, m), message.taken_bytes)
        done = self._forward_bytes(self._walk(job))
        rise = done.rise_bytes if s not in self._sharded else self._sharded[s].forward(done)
        height = rise, self._kept, self._gradients, self._buffers
        kept = {name: self._value(s, name, m) for name in done.kept}
        for name, key in kept.items():
            self._hold(key, done.kept[name])
        leaves = []
        for message in stage.incoming:
            key = self._value(s, message.name, m)
            if message.requires_grad:  # the leaf where its gradient will be left
                self._hold(key, message.taken_bytes)
                leaves.append(key)
            self._release(key)
        copies = self._walk(job).sent_copies
        for message in stage.outgoing:
            value = self._value(s, message.name, m)
            if self._is_local(message):
                self._hold(value, message.sent_bytes)
                continue
            key = ("copy", *value) if message.name in copies else value
            self._put(job, message, key, message.sent_bytes, is_grad=False)
        self._kept += done.kept_bytes + stage.loss_bytes
        self._own[s, m] = done.kept_bytes, kept, leaves
        sides = {self._value(s, name, m) for name in self._walk(job).side}
        held = {*kept.values(), *leaves} - sides
        shared = {key: self._bytes[key] for key in held if key in self._bytes}
        sent = sum(shared.pop(key, 0) for _, _, key in self._leaving)
        self.movable[s, m] = done.kept_bytes + sum(shared.values()), sent
        return height

    def _backward(self, job: Job) -> tuple[int, int, int, int]:
        s, m = job.stage_index, job.microbatch_index
        stage = self._stages[s]
        received = {o.name: o.sent_bytes for o in stage.outgoing if o.requires_grad}
        # The last block is run again before the gradients are waited for.
        blocks = self._walk(job).blocks if stage.sharded is None else ()
        again = blocks[-1].bytes.second_rise_bytes if blocks else 0
        ahead = again, self._kept, self._gradients, self._buffers
        for message in stage.outgoing:
            if message.requires_grad and not self._is_local(message):
                self._get(job, message, is_grad=True)
                self._buffers -= message.sent_bytes
                self._hold(
                    ("gradient", s, message.other_stage, message.name, m), message.sent_bytes
                )
        first = not stage.accumulates and s not in self._begun
        if stage.sharded is None or stage.sharded.keeps_sums:
            self._begun.add(s)
        split = job.kind is JobKind.BACKWARD_INPUT and stage.sharded is None
        own_bytes, kept, leaves = self._own.pop((s, m))
        staying = frozenset(
            name
            for name, key in kept.items()
            if name not in stage.walk.arriving and self._holders[key] > 1
        )
        done = self._backward_bytes(job, received, first=first, staying=staying)
        rise = done.rise_bytes
        if s in self._sharded:
            rise = self._sharded[s].backward(done, is_last=job in self.last_backwards)
        height = max(ahead, (rise, self._kept, self._gradients, self._buffers), key=sum)
        if split:
            waiting = [
                (self._value(s, name, m) if name in stage.walk.arriving else (s, m, name), size)
                for name, size in held_aside(done.aside).items()
            ]
            for key, size in waiting:
                self._hold(key, size)
            self._aside[s, m] = done.aside, [key for key, _ in waiting]
        self._kept -= own_bytes
        for key in (*kept.values(), *leaves):
            self._release(key)
        for message in stage.outgoing:
            if message.requires_grad:
                self._release(("gradient", s, message.other_stage, message.name, m))
        for message in stage.incoming:
            if message.requires_grad and self._is_local(message):
                self._hold(
                    ("gradient", message.other_stage, s, message.name, m), message.taken_bytes
                )
            elif message.requires_grad:
                key = "sent", s, message.name, m
                self._put(job, message, key, message.taken_bytes, is_grad=True)
        self._gradients += done.left_bytes
        return height

    def _weights(self, job: Job) -> tuple[int, int, int, int]:
        s, m = job.stage_index, job.microbatch_index
        aside, keys = self._aside.pop((s, m), ((), []))
        first = not self._stages[s].accumulates and s not in self._weights_begun
        self._weights_begun.add(s)
        rise, left = weight_job(aside, first=first, wide=self._stages[s].walk.wide)
        height = rise, self._kept, self._gradients, self._buffers
        for key in keys:
            self._release(key)
        self._gradients += left
        return height


def _arrival(
    stage: int, message: Message, microbatch: int, *, comes: bool, is_grad: bool
) -> Arrival:
    """What a stage gets (`comes`) or sends: a value goes from producer to consumer, a gradient
    back.
    """
    is_consumer = comes is not is_grad
    ends = (message.other_stage, stage) if is_consumer else (stage, message.other_stage)
    return Arrival(*ends, message.name, is_grad, microbatch)
