"""The step of a plan as a timeline: jobs, and beside them what ranks exchange, lane by lane.

Every second and byte here is one that the estimate is made of; this module only says where it is
drawn. Of a job the cost model has sums by axis, and they are drawn so: a bar for each axis, its
hidden part beside the end of the job's compute, its exposed part behind that, one axis after the
other. Where in a job a collective runs is not in a bar.

    compute  [ F0.0: computes ......... | exposed ]
    tp                      [~ hidden ~~|##]
    dp                  [~~ hidden ~~~~~|  ##]             (bars are moved together)

    tp, cp, hp, ep   collectives of blocks and of their entries; those that are recomputed, again
    dp               gathers of weights, sums and scatters of gradients. What comes once a step
                     (ZeRO 1 and 2) is hidden beside the first forward and the last backward; the
                     estimate adds what of it is exposed behind a rank's last job: there it stands
    copies           sums of shards over their copies (HSDP)
    pp from r        messages between stages, each from when it leaves until it is there; exposed is
                     what the rank that needs it waits meanwhile, with no other job
    pp               messages of a runtime that waits for them, in the job that does

The exposed seconds of a rank add up to the parts of the estimate (`costmodel.time.step_path`):
those of tp, cp, hp and ep to tp_comm_s (but for what selective recomputation runs again, which is
in recompute_s), those of dp and copies to dp_comm_s, those of pp to waited_s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from costmodel.cache import CostCache
from costmodel.compare import as_rank_timelines
from costmodel.estimate import SimulatedStep, slowest_step
from costmodel.time.block.moved import Moved
from costmodel.time.plan_price import PlanPrice, stages_of_rank
from planner.language.plan import Plan
from planner.language.schedule.jobs import Job, JobKind
from planner.language.schedule.timing.simulate import SentMessage
from planner.timeline import (
    COLLECTIVE,
    MESSAGE,
    REPLICAS,
    STAGES,
    RankTimeline,
    Span,
    lane_from,
)
from profiles.profile import Amount

COPIES = "copies"
"""The lane of sums over the copies of shards."""

_BACKWARDS = (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What a job, or a rank once a step, exchanges in a lane."""

    lane: str
    """An axis of the mesh, or what is exchanged between stages."""
    name: str
    """In words."""
    number: int
    """Collectives or messages."""
    num_bytes: float
    """Bytes of the whole tensors."""
    hidden_s: float
    """Seconds beside compute."""
    exposed_s: float
    """Seconds that lengthen the job, or the step."""

    @property
    def is_nothing(self) -> bool:
        """Whether it takes no time at all."""
        return not self.hidden_s and not self.exposed_s


@dataclass(frozen=True, kw_only=True)
class StageExchange:
    """What the jobs of one stage exchange."""

    forward: tuple[Exchanged, ...]
    """A forward."""
    backward: tuple[Exchanged, ...]
    """A backward, or its first half."""
    last_backward: tuple[Exchanged, ...]
    """That of the microbatch whose forward is the step's last."""
    beside_first: tuple[Exchanged, ...]
    """Once, beside the first forward."""
    beside_last: tuple[Exchanged, ...]
    """Once, beside the last backward."""
    after: tuple[Exchanged, ...]
    """Once, behind the rank's last job."""


def timeline_with_lanes(plan: Plan, costs: CostCache) -> tuple[RankTimeline, ...]:
    """Return the simulated step of each pp rank of a plan's slowest replicas, with what it
    exchanges.
    """
    step = slowest_step(plan, costs)
    stages = [stage_exchange(step.price, s) for s in range(len(step.price.plan.stages))]
    messages: list[list[SentMessage]] = [[] for _ in range(plan.pp)]
    for message in step.timeline.messages:
        messages[message.receiver].append(message)
    return tuple(
        replace(
            line,
            spans=(
                *line.spans,
                *_in_jobs(step, stages, line.pp_rank),
                *_behind_jobs(step, stages, line.pp_rank),
                *(_message(step, message) for message in messages[line.pp_rank]),
            ),
        )
        for line in as_rank_timelines(step.timeline)
    )


def stage_exchange(price: PlanPrice, s: int) -> StageExchange:
    """Return what the jobs of a stage of a priced plan exchange."""
    costs, stage = price.meshes[s], price.plan.stages[s]
    blocks = costs.runs.chain
    forward: list[Moved] = []
    backward: list[Moved] = []
    again: list[Moved] = []
    for index, recompute in zip(stage.blocks, stage.recompute_by_block, strict=True):
        moved = blocks.moved(index)
        forward += moved.forward
        backward += moved.backward
        if recompute == "selective":
            again += moved.again
        elif recompute == "full" and blocks.has_backward(index):
            again += moved.forward
    whole, shown = costs.exchange, costs.exposed
    sizes, numbers = costs.exchanged("bytes"), costs.exchanged("messages")

    def of_replicas(
        part: str, name: str, *, on_host_s: Amount = 0.0, lane: str = REPLICAS
    ) -> list[Exchanged]:
        """Return a part of the exchange; `on_host_s`: the host's hooks, which are exposed in it."""
        exposed_s = _at(getattr(shown, part), s)
        whole_s = _at(getattr(whole, part), s) + _at(on_host_s, s)
        found = Exchanged(
            lane=lane,
            name=name,
            number=round(_at(getattr(numbers, part), s)),
            num_bytes=_at(getattr(sizes, part), s),
            hidden_s=max(0.0, whole_s - exposed_s),
            exposed_s=exposed_s,
        )
        return [] if found.is_nothing else [found]

    def waited(seconds: Amount) -> list[Exchanged]:
        found = Exchanged(
            lane=STAGES, name="message", number=1, num_bytes=0.0, hidden_s=0.0,
            exposed_s=_at(seconds, s),
        )  # fmt: skip
        return [] if found.is_nothing else [found]

    # In every backward ZeRO 2 and 3 scatter gradients; what follows once is the sum over copies.
    sums = of_replicas(
        "last_backward_s",
        "sums of gradients",
        lane=COPIES if _at(whole.backward_s, s) else REPLICAS,
    )
    gathers = of_replicas("first_forward_s", "gathers of weights")
    there, back = price.job_waits_s
    in_backward = [
        *of_replicas("backward_s", "gathers and scatters", on_host_s=whole.host_backward_s),
        *waited(back),
    ]
    backwards = [
        (*_by_axis([*backward, *more]), *in_backward)
        for more in (again, again if stage.recompute_last else [])
    ]
    return StageExchange(
        forward=(
            *_by_axis(forward),
            *of_replicas("forward_s", "gathers of weights", on_host_s=whole.host_forward_s),
            *waited(there),
        ),
        backward=backwards[0],
        last_backward=backwards[1],
        beside_first=tuple(replace(each, exposed_s=0.0) for each in gathers if each.hidden_s),
        beside_last=tuple(replace(each, exposed_s=0.0) for each in sums if each.hidden_s),
        after=tuple(
            replace(each, hidden_s=0.0)
            for each in (*gathers, *sums, *of_replicas("after_s", "sums of gradients"))
            if each.exposed_s
        ),
    )


def _at(amount: Amount, s: int) -> float:
    """Return the entry of a stage; a number is every stage's."""
    return float(np.atleast_1d(amount)[s if np.ndim(amount) else 0])


def _by_axis(moved: Iterable[Moved]) -> Iterator[Exchanged]:
    """Yield collectives of blocks by their axis."""
    found: dict[str, list[Moved]] = {}
    for each in moved:
        found.setdefault(each.axis, []).append(each)
    for axis, of_axis in found.items():
        whole = Exchanged(
            lane=axis,
            name="collectives",
            number=sum(each.number for each in of_axis),
            num_bytes=sum(each.num_bytes for each in of_axis),
            hidden_s=sum(each.hidden_s for each in of_axis),
            exposed_s=sum(each.shown_s for each in of_axis),
        )
        if not whole.is_nothing:
            yield whole


def _in_jobs(step: SimulatedStep, stages: Sequence[StageExchange], rank: int) -> Iterator[Span]:
    timeline = step.timeline
    jobs, starts, ends = timeline.schedule.jobs[rank], timeline.start_s[rank], timeline.end_s[rank]
    # Durations of backwards of a stage's last forward come behind those of all kinds of jobs.
    kinds = step.table.rows[rank].duration // timeline.schedule.num_stages
    first, last = _first_and_last(jobs)
    for place, job in enumerate(jobs):
        of_stage = stages[job.stage_index]
        if job.kind is JobKind.FORWARD:
            own = of_stage.forward
            once = of_stage.beside_first if first[job.stage_index] == place else ()
        elif job.kind in _BACKWARDS:
            own = of_stage.last_backward if kinds[place] >= len(JobKind) else of_stage.backward
            once = of_stage.beside_last if last[job.stage_index] == place else ()
        else:
            continue
        computed_s = float(ends[place]) - sum(each.exposed_s for each in own)
        waited_s = sum(each.exposed_s for each in own if each.lane == STAGES)
        # What a job waits for comes ahead of its compute, the rest behind.
        arrives_s, behind_s = float(starts[place]), computed_s + waited_s
        for each in chain(own, once):
            if each.lane == STAGES:
                begin_s = arrives_s
            elif each.exposed_s:
                begin_s = behind_s - each.hidden_s
                behind_s += each.exposed_s
            else:
                begin_s = computed_s + waited_s - each.hidden_s
            yield _span(each, begin_s, job)


def _first_and_last(jobs: Sequence[Job]) -> tuple[dict[int, int], dict[int, int]]:
    """Return by stage the places of its first forward and of its last backward."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, job in enumerate(jobs):
        if job.kind is JobKind.FORWARD:
            first.setdefault(job.stage_index, place)
        elif job.kind in _BACKWARDS:
            last[job.stage_index] = place
    return first, last


def _behind_jobs(step: SimulatedStep, stages: Sequence[StageExchange], rank: int) -> Iterator[Span]:
    """Yield what a rank exchanges behind its last job, ahead of its optimizer."""
    at_s = step.timeline.rank_end_s[rank]
    shared = Exchanged(
        lane=REPLICAS, name="gradients of shared parameters", number=1, num_bytes=0.0, hidden_s=0.0,
        exposed_s=step.price.once.tied_s[rank],
    )  # fmt: skip
    own = [each for s in stages_of_rank(step.price.plan, rank) for each in stages[s].after]
    for each in (*own, *([] if shared.is_nothing else [shared])):
        yield _span(each, at_s, None)
        at_s += each.exposed_s


def _span(each: Exchanged, begin_s: float, job: Job | None) -> Span:
    return Span(
        kind=COLLECTIVE,
        name=each.name,
        step=0,
        start_s=begin_s,
        end_s=begin_s + each.hidden_s + each.exposed_s,
        stage=-1 if job is None else job.stage_index,
        microbatch=-1 if job is None else job.microbatch_index,
        lane=each.lane,
        num_bytes=round(each.num_bytes),
        number=each.number,
        hidden_s=each.hidden_s,
    )


def _message(step: SimulatedStep, message: SentMessage) -> Span:
    """Return a message between stages; exposed is what its receiver waits for it in no job."""
    timeline, position = step.timeline, message.position
    free_s = float(timeline.end_s[message.receiver][position - 1]) if position else 0.0
    waits_s = max(0.0, message.end_s - max(free_s, message.start_s))
    is_gradient = message.result.kind == "G"
    # What arrives at a stage is the output of the one before, or the gradient of its own output.
    into = message.result.stage_index + (0 if is_gradient else 1)
    runs = step.price.meshes[into].runs
    sizes = runs.chain.messages.arriving(runs.start[into : into + 1], runs.end[into : into + 1])
    stage = into - 1 if is_gradient else into
    return Span(
        kind=MESSAGE,
        name=f"{'gradient' if is_gradient else 'output'} of stage {message.result.stage_index}",
        step=0,
        start_s=message.start_s,
        end_s=message.end_s,
        stage=stage,
        microbatch=message.result.microbatch_index,
        lane=lane_from(message.sender),
        num_bytes=round(float(sizes[int(is_gradient), 0, 0])),
        hidden_s=message.end_s - message.start_s - waits_s,
    )
