"""The jobs of one stage as a rank's byte walk takes them, and how each job of a row runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from costmodel.memory.exact.fsdp_walk import ShardedStage
from costmodel.memory.exact.stage_walk import StageWalk
from planner.schedule.jobs import Job, JobKind


class Message(NamedTuple):
    """A value that a stage takes from another, or hands on: its name in the stage's walk and in
    the model, bytes as it lies on the consumer and on the producer, the other stage, and whether
    its gradient comes back.
    """

    name: str
    tensor: str
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
    `alone` remembers what microbatches hold on stages of this kind that hand nothing over in place
    (`costmodel.memory.exact.microbatch.before_any_job`).
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
    alone: list[Any] = field(default_factory=list, compare=False, repr=False)


WalkName = Literal["walk", "last", "first_aside", "all_aside"]


class Way(NamedTuple):
    """How a job runs: its stage and the walk of that it is of; whether the gradients it makes stay
    (`is_first`), or are added to others; how many blocks put weight gradients aside; and whether
    it is its stage's last backward.
    """

    kind: JobKind
    stage_index: int
    walk: WalkName
    is_first: bool
    num_aside: int
    is_last: bool


def ways_of(
    row: Sequence[Job], stages: Mapping[int, StageJobs], called: Mapping[int, int]
) -> Iterator[Way]:
    """Yield how each job of a rank's row runs; `called` names stages as ways are to call them."""
    forward, backward, makes = {}, {}, {}
    split: set[tuple[int, int]] = set()
    for job in row:
        s, kind = job.stage_index, job.kind
        if kind is JobKind.FORWARD:
            forward[s] = job.microbatch_index
            continue
        if kind is not JobKind.BACKWARD_WEIGHT:
            backward[s] = job
        if kind is JobKind.BACKWARD_INPUT:
            split.add((s, job.microbatch_index))
        else:
            makes[s] = job
    adds = {s: stage.sharded is None or stage.sharded.keeps_sums for s, stage in stages.items()}
    begun: set[tuple[int, bool]] = set()
    for job in row:
        s, m, kind = job.stage_index, job.microbatch_index, job.kind
        stage = stages[s]
        walk: WalkName = "walk"
        if stage.last is not stage.walk and forward[s] == m:
            walk = "last"
        elif stage.sharded is None and (stage.sends_first or (s, m) in split):
            ends = (s, m) in split or (s in makes and makes[s].microbatch_index == m)
            walk = "all_aside" if ends else "first_aside"
        if kind is JobKind.FORWARD:
            yield Way(kind, called[s], walk, False, 0, False)
            continue
        is_weight = kind is JobKind.BACKWARD_WEIGHT
        is_first = not stage.accumulates and (s, is_weight) not in begun
        if is_weight or adds[s]:
            begun.add((s, is_weight))
        num_aside = 0
        if kind is JobKind.BACKWARD_INPUT and stage.sharded is None:
            num_aside = len(stage.walk.blocks)
        elif stage.sends_first and not is_weight:
            num_aside = len(stage.walk.blocks) if makes[s] is job else 1
        is_last = not is_weight and backward[s] is job
        yield Way(kind, called[s], walk, is_first, num_aside, is_last)
