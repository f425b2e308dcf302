"""The jobs of one stage as a rank's walk takes them, and how each job of a row runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from costmodel.memory.exact.stage.fsdp_units import ShardedStage
from costmodel.memory.exact.stage.stage_walk import StageWalk
from planner.language.schedule.jobs import Job, JobKind


class Message(NamedTuple):
    """A value that a stage takes from another, or sends on."""

    edge: int
    """Which of the plan's edges it goes along."""
    name: str
    """The value in the stage's walk."""
    num_bytes: int
    """Bytes of the value, and of its gradient, as they lie on this stage's rank."""
    other_stage: int
    """The stage at the other end."""
    requires_grad: bool
    """Whether its gradient comes back."""


@dataclass(frozen=True, kw_only=True)
class StageJobs:
    """The jobs of one stage."""

    walk: StageWalk
    """The blocks as most microbatches run them."""
    last: StageWalk
    """As the step's last microbatch runs them, which may not be recomputed: its backward is next,
    so to free its activations would gain nothing."""
    first_deferred: StageWalk
    """With the first block's weight gradients deferred."""
    all_deferred: StageWalk
    """With all weight gradients deferred."""
    incoming: Sequence[Message]
    """Values taken from other stages."""
    outgoing: Sequence[Message]
    """Values sent on."""
    accumulates: bool
    """Whether gradients have their buffers from the start of the step."""
    sends_first: bool
    """Whether a full backward defers weight gradients until the gradients that another rank waits
    for have been sent: those of its first block, in the stage's last backward all."""
    on_host: bool
    """Whether what a microbatch keeps is offloaded, where its wait is long enough."""
    loss_bytes: int
    """A microbatch's loss, if the stage makes it: it stays to the end of the step."""
    sharded: ShardedStage | None = None
    """Its parameters under ZeRO: gradients and messages are then FSDP2's."""


WalkName = Literal["walk", "last", "first_deferred", "all_deferred"]


class JobVariant(NamedTuple):
    """How a job of a row runs. Jobs of one variant do the same to a microbatch's bytes."""

    kind: JobKind
    """Forward, backward, or a part of that."""
    stage_index: int
    """The stage."""
    walk: WalkName
    """The field of `StageJobs` that it walks."""
    is_first: bool
    """Whether the gradients it makes stay: later ones are added to them."""
    num_deferred: int
    """How many blocks defer their weight gradients."""
    is_last: bool
    """Whether it is its stage's last backward."""


def job_variants(row: Sequence[Job], stages: Mapping[int, StageJobs]) -> Iterator[JobVariant]:
    """Yield how each job of a rank's row runs."""
    last_forward, last_backward, last_weights = {}, {}, {}
    split: set[tuple[int, int]] = set()
    for job in row:
        s, kind = job.stage_index, job.kind
        if kind is JobKind.FORWARD:
            last_forward[s] = job.microbatch_index
            continue
        if kind is not JobKind.BACKWARD_WEIGHT:
            last_backward[s] = job
        # Weight gradients are made by full backwards and by W jobs.
        if kind is JobKind.BACKWARD_INPUT:
            split.add((s, job.microbatch_index))
        else:
            last_weights[s] = job
    # Under ZeRO 2 and 3, and where sums are fp32, FSDP2 takes each gradient away: it stays new.
    adds = {s: stage.sharded is None or stage.sharded.keeps_sums for s, stage in stages.items()}
    summed: set[tuple[int, bool]] = set()
    for job in row:
        s, m, kind = job.stage_index, job.microbatch_index, job.kind
        stage = stages[s]
        walk: WalkName = "walk"
        if stage.last is not stage.walk and last_forward[s] == m:
            walk = "last"
        elif stage.sharded is None and (stage.sends_first or (s, m) in split):
            # Forward and backward agree on what is deferred: products save other things then.
            is_last = s in last_weights and last_weights[s].microbatch_index == m
            walk = "all_deferred" if is_last or (s, m) in split else "first_deferred"
        if kind is JobKind.FORWARD:
            yield JobVariant(kind, s, walk, False, 0, False)
            continue
        # Products and other ops make their gradients in jobs of their own if backward is split.
        is_weight = kind is JobKind.BACKWARD_WEIGHT
        is_first = not stage.accumulates and (s, is_weight) not in summed
        if is_weight or adds[s]:
            summed.add((s, is_weight))
        num_deferred = 0
        if kind is JobKind.BACKWARD_INPUT and stage.sharded is None:
            num_deferred = len(stage.walk.blocks)
        # The early send: the last backward defers all weight gradients, as the rank before has
        # nothing left to do but to wait; others only the first block's, enough to hide a message.
        elif stage.sends_first and not is_weight:
            num_deferred = len(stage.walk.blocks) if last_weights[s] is job else 1
        is_last = not is_weight and last_backward[s] is job
        yield JobVariant(kind, s, walk, is_first, num_deferred, is_last)
