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
from costmodel.memory.exact.microbatch import LinkedStages, MicrobatchBytes, Storage
from costmodel.memory.exact.stage.jobs import JobVariant, StageJobs, job_variants
from planner.language.schedule.jobs import Job, JobKind
from planner.language.schedule.timing.offloads import Offload, offloads_of


class MemorySample(NamedTuple):
    """The bytes of a rank during one job, above what lies there all the time."""

    job: Job
    """The job."""
    end_bytes: int
    """Alive when the job has ended."""
    peak_bytes: int
    """Alive at the job's height: the next four, and what the job holds only while it runs."""
    saved_bytes: int
    """Activations saved for backwards."""
    gradient_bytes: int
    """Gradients of parameters."""
    weight_bytes: int
    """Weights that ZeRO has gathered, and the messages that they arrive in."""
    buffer_bytes: int
    """Receive buffers."""
    host_bytes: int
    """Activations on the host."""

    def with_more_saved(self, more_bytes: int) -> MemorySample:
        """Return the sample with more saved all the time."""
        return self._replace(
            end_bytes=self.end_bytes + more_bytes,
            peak_bytes=self.peak_bytes + more_bytes,
            saved_bytes=self.saved_bytes + more_bytes,
        )

    def with_more_buffers(self, more_bytes: int) -> MemorySample:
        """Return the sample with more receive buffers all the time."""
        return self._replace(
            end_bytes=self.end_bytes + more_bytes,
            peak_bytes=self.peak_bytes + more_bytes,
            buffer_bytes=self.buffer_bytes + more_bytes,
        )


def walk_rank(
    row: Sequence[Job],
    stages: Mapping[int, StageJobs],
    home: Callable[[int], int],
    *,
    receive_ahead: int,
    traffic: Traffic | None = None,
    streams_keep: bool = False,
    keeps_gradient: bool = False,
) -> Iterator[MemorySample]:
    """Yield a sample for each job of a rank; `home` gives the pp rank of a stage.

    Receives are posted `receive_ahead` jobs ahead. Without `traffic` they are posted in the order
    of need, and what is sent has left at once. `streams_keep` says that messages are received on
    streams of their own: what is freed then can't be allocated again before all that such a stream
    was given has come, so up to `receive_ahead` jobs' messages more. `keeps_gradient` says that the
    gradient which a backward sent stays to the next.
    """
    tally = _RankTally(stages, home, traffic or Traffic())
    kept = receive_ahead * tally.most_wanted_bytes if streams_keep else 0
    waiting = [index for index, stage in stages.items() if stage.on_host]
    offloads = _Offloads(offloads_of(row, waiting)) if waiting else None
    # Receives are posted before their job, so that a sender on another rank need not wait.
    for job in row[:receive_ahead]:
        tally.post(job)
    variants = job_variants(row, stages)
    for position, (job, variant) in enumerate(zip(row, variants, strict=True)):
        if position + receive_ahead < len(row):
            tally.post(row[position + receive_ahead])
        host_bytes = 0 if offloads is None else offloads.move(position, tally)
        sample = tally.run(job, variant, host_bytes)
        yield sample.with_more_buffers(kept) if kept else sample
        if keeps_gradient and job.kind is not JobKind.FORWARD:
            kept += tally.most_sent_back_bytes
            keeps_gradient = False


_Place = tuple[int, int]
"""A microbatch on a stage: (stage, microbatch)."""


class _Offloads:
    """Microbatches that are copied to the host, and back, each beside a job of the rank."""

    def __init__(self, offloads: Sequence[Offload]) -> None:
        self._leaving: dict[int, list[_Place]] = {}
        self._arriving: dict[int, list[_Place]] = {}
        for offload in offloads:
            place = offload.stage_index, offload.microbatch_index
            self._leaving.setdefault(offload.leaving, []).append(place)
            self._arriving.setdefault(offload.arriving, []).append(place)

    def move(self, position: int, tally: _RankTally) -> int:
        """Count what is copied beside the job at a position of the row, and return the bytes that
        the host then has.
        """
        # A copy runs beside one job: what is offloaded beside a job is off the device after it,
        # and what is prefetched beside a job is on the device from its start.
        for place in self._leaving.get(position, ()):
            tally.host_bytes += sum(tally.movable[place])
        for place in self._leaving.get(position - 1, ()):
            tally.offloaded_bytes += tally.movable[place][0]
        for place in self._arriving.get(position, ()):
            tally.offloaded_bytes -= tally.movable[place][0]
        # What is offloaded gets its place on the host before what has come back frees its own.
        host_bytes = tally.host_bytes
        for place in self._arriving.get(position - 1, ()):
            tally.host_bytes -= sum(tally.movable[place])
        return host_bytes


class _UnderWay(NamedTuple):
    """A message that was sent and may not have left: its sender keeps the storage."""

    target: int
    """The rank that gets it."""
    arrival: Arrival
    """What it is there."""
    storage: Storage


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
        # By (stage, is_grad): what other ranks send here for a job of the stage. Stages of this
        # rank hand over in place, without a buffer.
        self._arriving = {
            (s, is_grad): [
                message
                for message in (stage.outgoing if is_grad else stage.incoming)
                if message.other_stage not in stages and (message.requires_grad or not is_grad)
            ]
            for s, stage in stages.items()
            for is_grad in (False, True)
        }
        self._bytes_of = {
            (message.edge, is_grad): message.num_bytes
            for (_, is_grad), messages in self._arriving.items()
            for message in messages
        }
        self._sharded = {
            index: ShardedBytes(stage.sharded)
            for index, stage in stages.items()
            if stage.sharded is not None
        }
        linked = LinkedStages(stages, keeps_sent=bool(traffic.taken_at))
        # All microbatches start from one state, so those that run alike share what was simulated.
        self._unseen = MicrobatchBytes(linked)
        self._microbatches: dict[int, MicrobatchBytes] = {}
        self._under_way: list[_UnderWay] = []
        self.movable: dict[_Place, tuple[int, int]] = {}
        """What an offload frees of a microbatch: its own, and also kept by a message under way."""
        self.offloaded_bytes = self.host_bytes = 0
        self._saved = self._buffers = self._gradients = 0
        # Sums that stay from step to step are there before the first job.
        states = [sharded.state for sharded in self._sharded.values()]
        self._sharded_bytes = sum(state.live_bytes for state in states)
        self._sharded_gradients = sum(state.gradient_bytes for state in states)
        self._sharded_weights = 0

    @property
    def most_wanted_bytes(self) -> int:
        """The most bytes that a job gets from other ranks."""
        found = (sum(m.num_bytes for m in messages) for messages in self._arriving.values())
        return max(found, default=0)

    @property
    def most_sent_back_bytes(self) -> int:
        """The most bytes that a backward sends to other ranks."""
        return max(
            sum(m.num_bytes for m in self._arriving[stage, False] if m.requires_grad)
            for stage, is_grad in self._arriving
            if not is_grad
        )

    def _wanted(self, job: Job) -> list[tuple[int, Arrival]]:
        """Return what a job gets from other ranks, each with the rank that sends it."""
        if job.kind is JobKind.BACKWARD_WEIGHT:
            return []
        is_grad = job.kind is not JobKind.FORWARD
        return [
            (self._home(message.other_stage), Arrival(message.edge, is_grad, job.microbatch_index))
            for message in self._arriving[job.stage_index, is_grad]
        ]

    def post(self, job: Job) -> None:
        """Allocate the receive buffers of a job."""
        for source, wanted in self._wanted(job):
            for posted in self._receives.expect(source, wanted):
                self._buffers += self._bytes_of[posted.edge, posted.is_grad]

    def run(self, job: Job, variant: JobVariant, host_bytes: int) -> MemorySample:
        """Run a job and return its sample."""
        s, m = job.stage_index, job.microbatch_index
        sharded = self._sharded.get(s)
        # Under ZeRO a job's height counts all that its stage holds, so only units of other stages
        # are beside it. Gradients are reported apart and not counted twice.
        gradients = self._gradients + self._sharded_gradients
        other_stages = self._sharded_bytes - (sharded.state.live_bytes if sharded else 0)
        beside = other_stages - self._sharded_gradients
        saved, buffers = self._saved, self._buffers
        if self._under_way:
            self._free_received(job)
        effect, self._microbatches[m] = self._microbatches.get(m, self._unseen).after(variant)
        rise = effect.rise_bytes
        weights = self._sharded_weights - (sharded.state.weight_bytes if sharded else 0)
        if sharded is not None and effect.done is not None:
            before = sharded.state
            rise, own_weights = sharded.run(effect.done, is_last=variant.is_last)
            weights += own_weights
            self._sharded_weights += sharded.state.weight_bytes - before.weight_bytes
            self._sharded_bytes += sharded.state.live_bytes - before.live_bytes
            self._sharded_gradients += sharded.state.gradient_bytes - before.gradient_bytes
        # From here on what arrived belongs to the microbatch; the height counts it there.
        self._buffers -= effect.taken_bytes
        at_height = self._saved + effect.taken_bytes
        # A backward's recomputation runs before it waits for gradients: those are in receive
        # buffers still. The job's height is the higher of the two points.
        ahead = effect.ahead_bytes
        if ahead is None or ahead + saved + buffers < rise + at_height + self._buffers:
            saved, buffers = at_height, self._buffers
        else:
            rise, weights = ahead, 0
        self._saved += effect.kept_bytes
        self._gradients += effect.new_gradient_bytes
        if self._traffic.taken_at:
            is_grad = job.kind is not JobKind.FORWARD
            self._under_way += [
                _UnderWay(
                    self._home(message.other_stage),
                    Arrival(message.edge, is_grad, m),
                    storage,
                )
                for message, storage in effect.sent
            ]
        if effect.movable is not None:
            self.movable[s, m] = effect.movable
        # The tally of a microbatch keeps what was offloaded; each sample takes that out.
        live_bytes = self._saved + self._buffers + self._gradients + self._sharded_bytes
        saved -= self.offloaded_bytes
        return MemorySample(
            job,
            end_bytes=live_bytes - self.offloaded_bytes,
            peak_bytes=saved + gradients + buffers + rise + beside,
            saved_bytes=saved,
            gradient_bytes=gradients,
            weight_bytes=weights,
            buffer_bytes=buffers,
            host_bytes=host_bytes,
        )

    def _free_received(self, job: Job) -> None:
        """Free what others received before they sent what this job gets: on gloo a message's
        arrival is the first proof that earlier ones have left.
        """
        for source, arrival in self._wanted(job):
            # Both positions are of the other rank's row: what it had to take before it made this
            # has arrived there.
            made_at = self._traffic.made_at[arrival]
            for sent in [*self._under_way]:
                if sent.target == source and self._traffic.taken_at[sent.arrival] <= made_at:
                    self._under_way.remove(sent)
                    m = sent.arrival.microbatch
                    freed, self._microbatches[m] = self._microbatches[m].without(sent.storage)
                    self._saved -= freed
