"""Messages of a step, played by NCCL's rules: in one process, without a backend.

Each rank's real `Executor` and `Post` run through its jobs on tensors without data; its groups
record what they are given. `play` then runs the records as NCCL would: a communicator runs what it
was given in order, a send and its receive meet, and what a rank gives after a wait begins after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.language.lowering.wiring import Edge
from planner.language.plan import Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Job
from planner.runtime.process.groups.mesh import coordinate_of
from planner.runtime.process.spans import Spans
from planner.runtime.step.executor import Executor
from planner.runtime.step.messages import directions, p2p
from planner.runtime.step.messages.p2p import Message, Post, messages

META = torch.device("meta")
WAIT = "wait"

Communicator = tuple[int, tuple[int, ...]]
"""Its number among those that all ranks open, and its ranks."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A send or receive that a rank gave a communicator, or (`kind` is WAIT) waited for.

    `number` is the operation's on its rank; `ends` are the ranks it goes from and to.
    """

    kind: str
    number: int
    communicator: Communicator
    ends: tuple[int, int]
    message: Message

    def __str__(self) -> str:
        edge, microbatch, is_grad = self.message
        what = f"{'gradient of ' if is_grad else ''}edge {edge}, microbatch {microbatch}"
        return f"{self.kind} {self.ends[0]}>{self.ends[1]} {what}"


class Recorder:
    """What one rank gives, in order. Mutable."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.given: list[Given] = []
        self.message: Message | None = None

    def record(self, kind: str, group: Group, peer: int) -> Handle:
        assert self.message is not None
        other = group.ranks[peer]
        ends = (self.rank, other) if kind == "send" else (other, self.rank)
        given = Given(
            kind=kind,
            number=len(self.given),
            communicator=group.communicator,
            ends=ends,
            message=self.message,
        )
        self.given.append(given)
        return Handle(self, given)


@dataclass(frozen=True)
class Handle:
    """The work of a recorded operation; only waiting tells that it has ended."""

    recorder: Recorder
    given: Given

    def wait(self) -> None:
        self.recorder.given.append(replace(self.given, kind=WAIT))

    def is_completed(self) -> bool:
        return False


@dataclass(frozen=True)
class Group:
    """A communicator as one rank has it."""

    recorder: Recorder
    communicator: Communicator

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.communicator[1]

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Handle:
        return self.recorder.record("send", self, peer)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Handle:
        return self.recorder.record("receive", self, peer)


class RecordedPost(Post):
    """Names the message of what its groups are given."""

    recorder: Recorder

    def _receive(self, message: Message) -> None:
        self.recorder.message = message
        super()._receive(message)

    def put(self, message: Message, tensor: Tensor) -> None:
        self.recorder.message = message
        super().put(message, tensor)


class MessagesOnly(Executor):
    """Runs the messages of each job, and nothing between them."""

    def _do(self, job: Job, *rest: Any) -> None:
        for message in messages(job, self._edges, incoming=True):
            self._post.get(message)
        for message in messages(job, self._edges, incoming=False):
            shape = self._post._crossing(message).shape
            self._post.put(message, torch.empty(shape, device=META))


def messages_of(
    plan: Plan, edges: tuple[Edge, ...], rank: int, *, one_a_pair: bool = False
) -> list[Given]:
    """Return what a rank gives its communicators in a step of training, and waits for.

    With `one_a_pair` the two directions between pp ranks share a communicator.
    """
    recorder, schedule = Recorder(rank), schedule_of(plan)
    pp_rank, *_ = coordinate_of(plan, rank)
    opened = count(1)

    def open_group(groups: Sequence[tuple[int, ...]], **_: Any) -> Group | None:
        number = next(opened)  # (as all ranks open the same)
        mine = [ranks for ranks in groups if rank in ranks]
        return Group(recorder, (0 if one_a_pair else number, mine[0])) if mine else None

    mesh: Any = SimpleNamespace(
        device=META,
        meshes=tuple(plan.mesh(each) for each in range(plan.pp)),
        global_rank=rank,
        rank=lambda axis: pp_rank,
        open_group=open_group,
    )
    post = RecordedPost(mesh, schedule, edges, plan)
    post.recorder = recorder
    unused: Any = None
    stage: Any = SimpleNamespace(is_recomputed=False)
    executor = MessagesOnly(
        schedule=schedule,
        pp_rank=pp_rank,
        stages={s: stage for s, each in enumerate(plan.stages) if each.pp_rank == pp_rank},
        edges=edges,
        post=post,
        hooks=unused,
        spans=Spans(None),
        lookahead=plan.receive_ahead,
    )
    feed: Any = SimpleNamespace(split=None, bucket=0)
    executor.train(feed)
    return recorder.given


class OutOfOrderError(AssertionError):
    """Two ranks have the messages between them in different orders."""


class StuckError(AssertionError):
    """Ranks wait for each other."""


def play(ranks: Sequence[Sequence[Given]]) -> int:
    """Run what ranks give by NCCL's rules; return how many messages there were.

    Raises OutOfOrderError or StuckError, with what each rank has given and waits for.
    """
    left = [deque(given) for given in ranks]
    queues: dict[tuple[Communicator, int], deque[Given]] = {}
    ended: set[tuple[int, int]] = set()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, given in enumerate(left):
            while given and (given[0].kind != WAIT or (rank, given[0].number) in ended):
                first = given.popleft()
                if first.kind != WAIT:
                    queues.setdefault((first.communicator, rank), deque()).append(first)
                has_moved = True
        for (communicator, rank), queue in queues.items():
            while queue and queue[0].kind == "send":
                other = queues.get((communicator, queue[0].ends[1]))
                if not other or other[0].kind == "send" or other[0].ends != queue[0].ends:
                    break
                sent, taken = queue.popleft(), other.popleft()
                if sent.message != taken.message:
                    raise OutOfOrderError(f"{sent} meets {taken}")
                ended |= {(rank, sent.number), (sent.ends[1], taken.number)}
                has_moved = True
    stuck = [f"rank {rank} is at {given[0]}" for rank, given in enumerate(left) if given]
    if stuck:
        stuck += [
            f"communicator {number} of {members}, rank {rank}: {', '.join(map(str, queue))}"
            for ((number, members), rank), queue in queues.items()
            if queue
        ]
        raise StuckError("\n".join(stuck))
    assert not any(queues.values()), "a message that nobody takes"
    return len(ended) // 2


def follow_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each direction a communicator in this process, where none is real."""
    monkeypatch.setattr(directions.devices, "p2p_needs_own_groups", lambda device: True)
    monkeypatch.setattr(directions, "_greet", lambda mesh, groups: None)
    monkeypatch.setattr(p2p.dist, "get_group_rank", lambda group, rank: group.ranks.index(rank))
