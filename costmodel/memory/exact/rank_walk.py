"""The bytes of one rank over a step: its row of the job table, played as the executor does.

What is alive at any moment of a step: what is there all the time; gradients, from the first
backward on where they have no place of their own; what each microbatch in flight holds
(`microbatch_bytes`); receive buffers, posted a few jobs ahead; and the height of the job
that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from costmodel.memory.exact.fsdp_walk import ShardedBytes
from costmodel.memory.exact.messages import Arrival, Receives, Traffic
from costmodel.memory.exact.microbatch import MicrobatchBytes, Storage, before_any_job
from costmodel.memory.exact.stage_jobs import Message, StageJobs, Way, ways_of
from costmodel.memory.exact.stage_walk import BackwardBytes, ForwardBytes
from planner.schedule.jobs import Job, JobKind
from planner.schedule.trips import trips


class Moment(NamedTuple):
    """One job with the bytes alive at its end and at its height, above what is always there;
    at the height those kept for backward, in gradients, and in buffers. `host_bytes` are the
    activations on the host then.
    """

    job: Job
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
    *,
    receive_ahead: int,
    traffic: Traffic | None = None,
) -> Iterator[Moment]:
    """Yield a moment for each job of a rank; `home` gives the pp rank of a stage.

    Receives are posted `receive_ahead` jobs ahead. Without `traffic` they are posted in the order
    of need, and what is sent has left at once.
    """
    play = _Play(stages, home, traffic or Traffic())
    waiting = [index for index, stage in stages.items() if stage.on_host]
    travels = trips(row, waiting) if waiting else ()
    for job in row[:receive_ahead]:
        play.post(job)
    ways = ways_of(row, stages, play.called)
    for position, (job, way) in enumerate(zip(row, ways, strict=True)):
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
        yield play.run(job, way, host_bytes)


class _Play:
    """Bytes alive now. Mutable: it is a tally."""

    def __init__(
        self,
        stages: Mapping[int, StageJobs],
        home: Callable[[int], int],
        traffic: Traffic,
    ) -> None:
        self._stages, self._home = stages, home
        self._traffic, self._receives = traffic, Receives(traffic)
        self._arriving = {
            (s, is_grad): [
                message
                for message in (stage.outgoing if is_grad else stage.incoming)
                if message.other_stage not in stages and (message.requires_grad or not is_grad)
            ]
            for s, stage in stages.items()
            for is_grad in (False, True)
        }
        self._arriving_bytes = {
            (*_ends(s, message, comes=True, is_grad=is_grad), message.tensor, is_grad): (
                message.sent_bytes if is_grad else message.taken_bytes
            )
            for (s, is_grad), messages in self._arriving.items()
            for message in messages
        }
        self._posted = {
            (s, is_grad): sum(m.sent_bytes if is_grad else m.taken_bytes for m in messages)
            for (s, is_grad), messages in self._arriving.items()
        }
        self._sharded = {
            index: ShardedBytes(stage.sharded)
            for index, stage in stages.items()
            if stage.sharded is not None
        }
        self._unseen = before_any_job(stages, keeps_sent=bool(traffic.taken_at))
        self._microbatches: dict[tuple[int, int], MicrobatchBytes] = {}
        # (Who gets it, what it is, whose it is, and its storage there.)
        self._under_way: list[tuple[int, Arrival, tuple[int, int], Storage]] = []
        # What a microbatch keeps: of its own, and also kept by a message under way.
        self.movable: dict[tuple[int, int], tuple[int, int]] = {}
        self.away_bytes = self.host_bytes = 0
        self._kept = self._buffers = self._gradients = 0
        self._sharded_bytes = self._sharded_gradients = 0

    @property
    def called(self) -> dict[int, int]:
        """What each stage is called where its microbatches' bytes are found."""
        return {stage: called for stage, (_, called, _) in self._unseen.items()}

    def post(self, job: Job) -> None:
        """Make the receive buffers of a job."""
        if job.kind is JobKind.BACKWARD_WEIGHT:
            return
        is_grad = job.kind is not JobKind.FORWARD
        if not self._traffic.orders:
            self._buffers += self._posted[job.stage_index, is_grad]
            return
        for message in self._arriving[job.stage_index, is_grad]:
            wanted = self._arrival(job, message, comes=True)
            for posted in self._receives.expect(self._home(message.other_stage), wanted):
                self._buffers += self._arriving_bytes[posted[:4]]

    def run(self, job: Job, way: Way, host_bytes: int) -> Moment:
        """Run a job."""
        s, m = job.stage_index, job.microbatch_index
        sharded = self._sharded.get(s)
        gradients = self._gradients + self._sharded_gradients
        others_bytes = self._sharded_bytes - (sharded.held.live_bytes if sharded else 0)
        beside = others_bytes - self._sharded_gradients
        # What a backward runs again ahead of its gradients finds what arrived in buffers still.
        kept, buffers = self._kept, self._buffers
        if self._under_way:
            self._let_leave(job)
        group, _, unseen = self._unseen[s]
        holder = group, m
        held = self._microbatches.get(holder, unseen)
        effect, self._microbatches[holder] = held.after(way)
        rise = effect.rise_bytes
        if sharded is not None and effect.done is not None:
            rise = self._play_sharded(sharded, effect.done, way)
        self._buffers -= effect.taken_bytes
        height_bytes = self._kept + effect.height_bytes
        ahead = effect.ahead_bytes
        if ahead is None or ahead + kept + buffers < rise + height_bytes + self._buffers:
            kept, buffers = height_bytes, self._buffers
        else:
            rise = ahead
        self._kept += effect.kept_bytes
        self._gradients += effect.left_bytes
        if self._traffic.taken_at:
            self._under_way += [
                (
                    self._home(message.other_stage),
                    self._arrival(job, message, comes=False),
                    holder,
                    key,
                )
                for message, key in effect.sent
            ]
        if effect.movable is not None:
            self.movable[s, m] = effect.movable
        live_bytes = self._kept + self._buffers + self._gradients + self._sharded_bytes
        kept -= self.away_bytes
        peak_bytes = kept + gradients + buffers + rise + beside
        end_bytes = live_bytes - self.away_bytes
        return Moment(job, end_bytes, peak_bytes, kept, gradients, buffers, host_bytes)

    def _play_sharded(
        self, sharded: ShardedBytes, done: ForwardBytes | BackwardBytes, way: Way
    ) -> int:
        """Play a job's weights and gradients under ZeRO, and return its height."""
        before = sharded.held
        rise = (
            sharded.forward(done)
            if isinstance(done, ForwardBytes)
            else sharded.backward(done, is_last=way.is_last)
        )
        self._sharded_bytes += sharded.held.live_bytes - before.live_bytes
        self._sharded_gradients += sharded.held.gradient_bytes - before.gradient_bytes
        return rise

    def _let_leave(self, job: Job) -> None:
        """Let go what others took before they sent what a job gets."""
        if job.kind is JobKind.BACKWARD_WEIGHT:
            return
        is_grad = job.kind is not JobKind.FORWARD
        for message in self._arriving[job.stage_index, is_grad]:
            source = self._home(message.other_stage)
            made_at = self._traffic.made_at[self._arrival(job, message, comes=True)]
            for one in [*self._under_way]:
                target, sent, holder, key = one
                if target == source and self._traffic.taken_at[sent] <= made_at:
                    self._under_way.remove(one)
                    freed, self._microbatches[holder] = self._microbatches[holder].without(key)
                    self._kept -= freed

    def _arrival(self, job: Job, message: Message, *, comes: bool) -> Arrival:
        is_grad = job.kind is not JobKind.FORWARD
        ends = _ends(job.stage_index, message, comes=comes, is_grad=is_grad)
        return Arrival(*ends, message.tensor, is_grad, job.microbatch_index)


def _ends(stage: int, message: Message, *, comes: bool, is_grad: bool) -> tuple[int, int]:
    """Who made what a stage gets (`comes`) or sends, and who uses it: a value goes from producer
    to consumer, its gradient back.
    """
    is_consumer = comes is not is_grad
    return (message.other_stage, stage) if is_consumer else (stage, message.other_stage)
