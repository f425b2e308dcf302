"""The bytes of one rank over a step: its row of the job table, in the executor's order.

What is alive between two jobs, above what lies there all the time (`resident`):

    activations     what each microbatch in flight keeps on each stage (`microbatch`)
    gradients       from the first backward on, unless they have buckets from the start
    FSDP2's         gathered weights, whole and sharded gradients, messages (`fsdp_walk`)
    buffers         receives, posted `receive_ahead` jobs ahead so that senders need not wait

A job adds its own height to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from costmodel.memory.exact.fsdp_walk import ShardedBytes
from costmodel.memory.exact.messages import Arrival, Receives, Traffic
from costmodel.memory.exact.microbatch import Effect, MicrobatchBytes, Storage, before_any_job
from costmodel.memory.exact.stage.blocks import ForwardBytes
from costmodel.memory.exact.stage.jobs import JobVariant, Message, StageJobs, job_variants
from planner.schedule.jobs import Job, JobKind
from planner.schedule.trips import trips


class MemorySample(NamedTuple):
    """The bytes of a rank during one job, above what lies there all the time."""

    job: Job
    end_bytes: int
    """Alive when the job has ended."""
    peak_bytes: int
    """Alive at the job's height: the next three, and what the job holds only while it runs."""
    saved_bytes: int
    """Activations saved for backwards."""
    gradient_bytes: int
    """Gradients of parameters."""
    buffer_bytes: int
    """Receive buffers."""
    host_bytes: int
    """Activations on the host."""


def walk_rank(
    row: Sequence[Job],
    stages: Mapping[int, StageJobs],
    home: Callable[[int], int],
    *,
    receive_ahead: int,
    traffic: Traffic | None = None,
) -> Iterator[MemorySample]:
    """Yield a sample for each job of a rank; `home` gives the pp rank of a stage.

    Receives are posted `receive_ahead` jobs ahead. Without `traffic` they are posted in the order
    of need, and what is sent has left at once.
    """
    tally = _RankTally(stages, home, traffic or Traffic())
    waiting = [index for index, stage in stages.items() if stage.on_host]
    offloads = trips(row, waiting) if waiting else ()
    for job in row[:receive_ahead]:
        tally.post(job)
    variants = job_variants(row, stages, tally.stage_keys)
    for position, (job, variant) in enumerate(zip(row, variants, strict=True)):
        if position + receive_ahead < len(row):
            tally.post(row[position + receive_ahead])
        # A copy runs beside one job: what is offloaded beside a job is off the device after it,
        # and what is prefetched beside a job is on the device from its start.
        for offload in offloads:
            place = offload.stage_index, offload.microbatch_index
            if position == offload.leaving:
                tally.host_bytes += sum(tally.movable[place])
            if position == offload.leaving + 1:
                tally.offloaded_bytes += tally.movable[place][0]
            if position == offload.arriving:
                tally.offloaded_bytes -= tally.movable[place][0]
        # What is offloaded gets its place on the host before what has come back frees its own.
        host_bytes = tally.host_bytes
        for offload in offloads:
            if position == offload.arriving + 1:
                place = offload.stage_index, offload.microbatch_index
                tally.host_bytes -= sum(tally.movable[place])
        yield tally.run(job, variant, host_bytes)


class _RankTally:
    """Bytes alive now. Mutable: it is a tally."""

    def __init__(
        self,
        stages: Mapping[int, StageJobs],
        home: Callable[[int], int],
        traffic: Traffic,
    ) -> None:
        self._home = home
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
        self._under_way: list[tuple[int, Arrival, tuple[int, int], Storage]] = []
        """(Who gets it, what it is, whose it is, and its storage there.)"""
        self.movable: dict[tuple[int, int], tuple[int, int]] = {}
        """What an offload frees of a microbatch: its own, and also kept by a message under way."""
        self.offloaded_bytes = self.host_bytes = 0
        self._saved = self._buffers = self._gradients = 0
        self._sharded_bytes = self._sharded_gradients = 0

    @property
    def stage_keys(self) -> dict[int, int]:
        """The name of each stage where its microbatches' bytes are found: stages of one kind
        share them.
        """
        return {stage: key for stage, (_, key, _) in self._unseen.items()}

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

    def run(self, job: Job, variant: JobVariant, host_bytes: int) -> MemorySample:
        """Run a job and return its sample."""
        s, m = job.stage_index, job.microbatch_index
        sharded = self._sharded.get(s)
        gradients = self._gradients + self._sharded_gradients
        other_stages = self._sharded_bytes - (sharded.state.live_bytes if sharded else 0)
        beside = other_stages - self._sharded_gradients
        saved, buffers = self._saved, self._buffers
        if self._under_way:
            self._free_received(job)
        group, _, unseen = self._unseen[s]
        holder = group, m
        microbatch = self._microbatches.get(holder, unseen)
        effect, self._microbatches[holder] = microbatch.after(variant)
        rise = effect.rise_bytes
        if sharded is not None and effect.done is not None:
            rise = self._run_sharded(sharded, effect, is_last=variant.is_last)
        self._buffers -= effect.taken_bytes
        at_height = self._saved + effect.height_bytes
        # A backward's recomputation runs before it waits for gradients: those are in receive
        # buffers still. The job's height is the higher of the two points.
        ahead = effect.ahead_bytes
        if ahead is None or ahead + saved + buffers < rise + at_height + self._buffers:
            saved, buffers = at_height, self._buffers
        else:
            rise = ahead
        self._saved += effect.kept_bytes
        self._gradients += effect.new_gradient_bytes
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
        live_bytes = self._saved + self._buffers + self._gradients + self._sharded_bytes
        saved -= self.offloaded_bytes
        return MemorySample(
            job,
            end_bytes=live_bytes - self.offloaded_bytes,
            peak_bytes=saved + gradients + buffers + rise + beside,
            saved_bytes=saved,
            gradient_bytes=gradients,
            buffer_bytes=buffers,
            host_bytes=host_bytes,
        )

    def _run_sharded(self, sharded: ShardedBytes, effect: Effect, *, is_last: bool) -> int:
        """Simulate a job's weights and gradients under ZeRO, and return the job's height."""
        done, before = effect.done, sharded.state
        assert done is not None
        if isinstance(done, ForwardBytes):
            rise = sharded.forward(done)
        else:
            rise = sharded.backward(done, is_last=is_last)
        self._sharded_bytes += sharded.state.live_bytes - before.live_bytes
        self._sharded_gradients += sharded.state.gradient_bytes - before.gradient_bytes
        return rise

    def _free_received(self, job: Job) -> None:
        """Free what others received before they sent what this job gets: on gloo a message's
        arrival is the first proof that earlier ones have left.
        """
        if job.kind is JobKind.BACKWARD_WEIGHT:
            return
        is_grad = job.kind is not JobKind.FORWARD
        for message in self._arriving[job.stage_index, is_grad]:
            source = self._home(message.other_stage)
            made_at = self._traffic.made_at[self._arrival(job, message, comes=True)]
            for entry in [*self._under_way]:
                target, sent, holder, key = entry
                if target == source and self._traffic.taken_at[sent] <= made_at:
                    self._under_way.remove(entry)
                    freed, self._microbatches[holder] = self._microbatches[holder].without(key)
                    self._saved -= freed

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
