"""Tensors between pipeline ranks: posted early, never blocking, in an order both ends know.

The job table tells every rank which messages each other rank will send it, in which order.
Sender and receiver number the messages of a direction by that order, so gloo can match
them by tag and NCCL (which has no tags) by order, and no message carries a header: shapes
are static. A receive may be posted any time before it is needed; receives of a direction
are posted in order. Between two stages on one rank a tensor is handed over in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime import device as devices
from planner.runtime.mesh import Mesh, default_group
from planner.runtime.wiring import Edge
from planner.schedule.jobs import Job, JobKind, Schedule

_TAG_RANGE = 2**31 - 1


class Message(NamedTuple):
    """One tensor's one journey: an edge's value forward, or its gradient back."""

    edge: int
    microbatch: int
    is_grad: bool


class Ticket(NamedTuple):
    """A message together with the ranks (pp) it goes from and to."""

    message: Message
    source: int
    target: int


def taken_by(job: Job, edges: Iterable[Edge]) -> list[Message]:
    """Return the messages a job needs from other stages."""
    m = job.microbatch_index
    if job.kind is JobKind.FORWARD:
        return [Message(e.index, m, False) for e in edges if e.consumer == job.stage_index]
    if job.kind is JobKind.BACKWARD_WEIGHT:
        return []
    return [
        Message(e.index, m, True)
        for e in edges
        if e.producer == job.stage_index and e.requires_grad
    ]


def given_by(job: Job, edges: Iterable[Edge]) -> list[Message]:
    """Return the messages a job makes for other stages, in the order it sends them."""
    m = job.microbatch_index
    if job.kind is JobKind.FORWARD:
        return [Message(e.index, m, False) for e in edges if e.producer == job.stage_index]
    if job.kind is JobKind.BACKWARD_WEIGHT:
        return []
    return [
        Message(e.index, m, True)
        for e in edges
        if e.consumer == job.stage_index and e.requires_grad
    ]


class Post:
    """Sends and receives the messages of one pp rank for one run through the table.

    Mutable: it holds what is under way. `put` never blocks; `get` waits for one message.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, edges: tuple[Edge, ...]) -> None:
        self._mesh, self._edges = mesh, edges
        self._here = mesh.rank("pp")
        self._home = schedule.stage_to_pp_rank
        self._groups = _p2p_groups(mesh, edges, self._home)
        self._orders = {source: self._order(schedule, source) for source in range(schedule.pp)}
        self._waiting: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._local: dict[Message, Tensor] = {}
        self.waiting_for: Message | None = None
        self._sent = dict.fromkeys(range(schedule.pp), 0)
        self._received = dict.fromkeys(range(schedule.pp), 0)

    def _order(self, schedule: Schedule, source: int) -> tuple[Message, ...]:
        """What pp rank `source` sends here in one step, in order."""
        return tuple(
            message
            for job in schedule.jobs[source]
            for message in given_by(job, self._edges)
            if source != self._here and self._ticket(message).target == self._here
        )

    def _ticket(self, message: Message) -> Ticket:
        edge = self._edges[message.edge]
        ends = self._home[edge.producer], self._home[edge.consumer]
        source, target = ends[::-1] if message.is_grad else ends
        return Ticket(message, source, target)

    def open(self, *, with_grads: bool) -> None:
        """Begin a step; without gradients when it is forward only."""
        self._waiting = {
            source: deque(m for m in order if with_grads or not m.is_grad)
            for source, order in self._orders.items()
        }

    def expect(self, messages: Iterable[Message]) -> None:
        """Post the receives of `messages` (and of those due before them) unless posted."""
        for message in messages:
            source = self._ticket(message).source
            if source == self._here:
                continue
            queue = self._waiting[source]
            while message not in self._posted and queue:
                self._receive(queue.popleft(), source)

    def _receive(self, message: Message, source: int) -> None:
        edge = self._edges[message.edge]
        buffer = torch.empty(edge.shape, dtype=getattr(torch, edge.dtype), device=self._mesh.device)
        group = self._groups[source, self._here]
        tag = self._received[source] = (self._received[source] + 1) % _TAG_RANGE
        source_in_group = dist.get_group_rank(group, self._mesh.peer(source))
        self._posted[message] = group.recv([buffer], source_in_group, tag), buffer

    def get(self, message: Message) -> Tensor:
        """Return a message's tensor, waiting for it if it is not here yet."""
        if message in self._local:
            return self._local.pop(message)
        if message not in self._posted:
            self.expect((message,))
        work, buffer = self._posted.pop(message)
        self.waiting_for = message
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"waiting for {self.describe(message)}")
            raise
        self.waiting_for = None
        devices.keep_for_stream(buffer)
        return buffer

    def describe(self, message: Message) -> str:
        """Return what a message carries and who sends it, in words."""
        edge, source = self._edges[message.edge], self._ticket(message).source
        what = f"{'the gradient of ' if message.is_grad else ''}{edge.tensor} {list(edge.shape)}"
        peer = f"rank {self._mesh.peer(source)} (pp rank {source})"
        return f"{what} of microbatch {message.microbatch} from {peer}"

    def put(self, message: Message, tensor: Tensor) -> None:
        """Hand a tensor on; it is kept alive until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        target = self._ticket(message).target
        if target == self._here:
            self._local[message] = tensor
            return
        tensor = tensor.detach().contiguous()
        group = self._groups[self._here, target]
        tag = self._sent[target] = (self._sent[target] + 1) % _TAG_RANGE
        target_in_group = dist.get_group_rank(group, self._mesh.peer(target))
        self._sending.append((group.send([tensor], target_in_group, tag), tensor))

    def close(self) -> None:
        """End a step: wait until everything sent has left. Everything posted was taken."""
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()
        assert not self._posted, f"received but not used: {list(self._posted)}"
        assert not self._local, f"handed over but not used: {list(self._local)}"


def _p2p_groups(
    mesh: Mesh, edges: tuple[Edge, ...], home: tuple[int, ...]
) -> Mapping[tuple[int, int], dist.ProcessGroup]:
    """Return the group for each direction between two pp ranks that exchange tensors."""
    pairs = {(home[e.producer], home[e.consumer]) for e in edges}
    pairs |= {(b, a) for a, b in pairs}
    directed = sorted((a, b) for a, b in pairs if a != b)
    if not devices.p2p_needs_own_groups(mesh.device):
        return dict.fromkeys(directed, default_group())
    # Each group is made by its two ranks alone, in the same order on both.
    here = mesh.rank("pp")
    groups = {
        (a, b): dist.new_group([mesh.peer(a), mesh.peer(b)], use_local_synchronization=True)
        for a, b in directed
        if here in (a, b)
    }
    # A communicator's first use waits for the peer; in a step that could be in a ring.
    greeting = torch.zeros(1, device=mesh.device)
    for (a, b), group in groups.items():
        if here == a:
            dist.send(greeting, mesh.peer(b), group=group)
        else:
            dist.recv(greeting, mesh.peer(a), group=group)
    return groups
