"""Tensors between pipeline ranks: posted early, never blocking, in an order both ends know.

The job table tells every rank which messages each other rank will send it, in which order.
Sender and receiver number the messages of a direction by that order, so gloo can match
them by tag and NCCL (which has no tags) by order, and no message carries a header: shapes
follow from the size of the microbatch. Between stages of different meshes a message is
several parts (`routes`), from and to several ranks. A receive may be posted any time before
it is needed; receives of a direction are posted in order. Between two stages on one rank a
tensor is handed over in place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.batch_split import BatchSplit
from planner.layout import Box, sizes, slices
from planner.plan import Plan
from planner.runtime import device as devices
from planner.runtime.mesh import Mesh, default_group
from planner.runtime.routes import Part, Routes
from planner.runtime.wiring import Edge
from planner.schedule.jobs import Job, JobKind, Schedule

_TAG_RANGE = 2**31 - 1


class Message(NamedTuple):
    """One tensor's one journey: an edge's value forward, or its gradient back."""

    edge: int
    microbatch: int
    is_grad: bool


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


@dataclass(frozen=True, slots=True)
class Arriving:
    """A message on its way here: the box it fills, and the parts of it being received."""

    box: Box
    parts: tuple[tuple[dist.Work, Tensor, Box], ...]

    def wait(self) -> Tensor:
        """Return the message's tensor when all of it is here."""
        for work, part, _ in self.parts:
            work.wait()
            devices.keep_for_stream(part)
        _, first, first_box = self.parts[0]
        if first_box == self.box:
            return first
        whole = first.new_empty(sizes(self.box))
        for _, part, box in self.parts:
            whole[slices(box, self.box)] = part
        return whole


class Post:
    """Sends and receives the messages of one pp rank for one run through the table.

    Mutable: it holds what is under way. `put` never blocks; `get` waits for one message.
    `bytes_sent` counts what left for other ranks since it was made.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, edges: tuple[Edge, ...], plan: Plan) -> None:
        self._mesh, self._edges = mesh, edges
        self._here, self._rank = mesh.rank("pp"), dist.get_rank()
        self._home = schedule.stage_to_pp_rank
        self._routes = Routes(plan=plan)
        self._full = BatchSplit(
            num_samples=plan.global_batch, num_microbatches=plan.num_microbatches
        )
        self._split = self._full
        self._groups = _p2p_groups(mesh, edges, self._home, self._routes)
        self._orders = {source: self._order(schedule, source) for source in range(schedule.pp)}
        self._waiting: dict[int, deque[Message]] = {}
        self._posted: dict[Message, Arriving] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._local: dict[Message, Tensor] = {}
        self.waiting_for: Message | None = None
        self.bytes_sent = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def _order(self, schedule: Schedule, source: int) -> tuple[Message, ...]:
        """What pp rank `source` sends here in one step, in order."""
        return tuple(
            message
            for job in schedule.jobs[source]
            for message in given_by(job, self._edges)
            if source != self._here and self._ends(message)[1] == self._here
        )

    def _ends(self, message: Message) -> tuple[int, int]:
        """The pp ranks a message goes from and to."""
        edge = self._edges[message.edge]
        ends = self._home[edge.producer], self._home[edge.consumer]
        return ends[::-1] if message.is_grad else ends

    def _parts(self, message: Message) -> tuple[Part, ...]:
        return self._routes.parts(
            self._edges[message.edge], self._num_samples(message), is_grad=message.is_grad
        )

    def _box(self, message: Message) -> Box:
        return self._routes.box(self._edges[message.edge], self._num_samples(message), self._rank)

    def _num_samples(self, message: Message) -> int:
        return len(self._split.microbatch(message.microbatch))

    def open(self, *, with_grads: bool, split: BatchSplit | None = None) -> None:
        """Begin a step; without gradients when it is forward only.

        `split` is how the step's batch is cut; None for the plan's full batch.
        """
        self._split = split or self._full
        self._waiting = {
            source: deque(m for m in order if with_grads or not m.is_grad)
            for source, order in self._orders.items()
        }

    def expect(self, messages: Iterable[Message]) -> None:
        """Post the receives of `messages` (and of those due before them) unless posted."""
        for message in messages:
            source, _ = self._ends(message)
            if source == self._here:
                continue
            queue = self._waiting[source]
            while message not in self._posted and queue:
                self._receive(queue.popleft(), source)

    def _receive(self, message: Message, source: int) -> None:
        dtype = getattr(torch, self._edges[message.edge].dtype)
        group = self._groups[source, self._here]
        parts = []
        for sender, target, box in self._parts(message):
            if target != self._rank:
                continue
            buffer = torch.empty(sizes(box), dtype=dtype, device=self._mesh.device)
            tag = self._received[sender] = (self._received[sender] + 1) % _TAG_RANGE
            work = group.recv([buffer], dist.get_group_rank(group, sender), tag)
            parts.append((work, buffer, box))
        self._posted[message] = Arriving(self._box(message), tuple(parts))

    def get(self, message: Message) -> Tensor:
        """Return a message's tensor, waiting for it if it is not here yet."""
        if message in self._local:
            return self._local.pop(message)
        if message not in self._posted:
            self.expect((message,))
        arriving = self._posted.pop(message)
        self.waiting_for = message
        try:
            tensor = arriving.wait()
        except RuntimeError as error:
            error.add_note(f"waiting for {self.describe(message)}")
            raise
        self.waiting_for = None
        return tensor

    def describe(self, message: Message) -> str:
        """Return what a message carries and who sends it, in words."""
        edge, (source, _) = self._edges[message.edge], self._ends(message)
        shape = sizes(self._box(message))
        what = f"{'the gradient of ' if message.is_grad else ''}{edge.tensor} {list(shape)}"
        senders = sorted(part.source for part in self._parts(message) if part.target == self._rank)
        ranks = f"rank{'s' if len(senders) > 1 else ''} {', '.join(map(str, senders))}"
        return f"{what} of microbatch {message.microbatch} from {ranks} (pp rank {source})"

    def put(self, message: Message, tensor: Tensor) -> None:
        """Hand a tensor on; it is kept alive until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        _, target = self._ends(message)
        if target == self._here:
            self._local[message] = tensor
            return
        held = self._box(message)
        group = self._groups[self._here, target]
        for sender, receiver, box in self._parts(message):
            if sender != self._rank:
                continue
            part = tensor.detach() if box == held else tensor.detach()[slices(box, held)]
            part = part.contiguous()
            tag = self._sent[receiver] = (self._sent[receiver] + 1) % _TAG_RANGE
            work = group.send([part], dist.get_group_rank(group, receiver), tag)
            self._sending.append((work, part))
            self.bytes_sent += part.nbytes

    def close(self) -> None:
        """End a step: wait until everything sent has left. Everything posted was taken."""
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()
        assert not self._posted, f"received but not used: {list(self._posted)}"
        assert not self._local, f"handed over but not used: {list(self._local)}"


def _p2p_groups(
    mesh: Mesh, edges: tuple[Edge, ...], home: tuple[int, ...], routes: Routes
) -> Mapping[tuple[int, int], dist.ProcessGroup]:
    """Return the group for each direction between two pp ranks that exchange tensors."""
    pairs = {(home[e.producer], home[e.consumer]) for e in edges}
    pairs |= {(b, a) for a, b in pairs}
    directed = sorted((a, b) for a, b in pairs if a != b)
    if not devices.p2p_needs_own_groups(mesh.device):
        return dict.fromkeys(directed, default_group())
    groups = {}
    for a, b in directed:
        group = mesh.open_group([(*mesh.meshes[a].ranks, *mesh.meshes[b].ranks)])
        if group is not None:
            groups[a, b] = group
    # A communicator's first use waits for the peer; in a step that could be in a ring. Here
    # all go through the pairs in one order.
    greeting = torch.zeros(1, device=mesh.device)
    here, place = dist.get_rank(), mesh.rank("pp")
    for source, target in sorted({pair for e in edges for pair in routes.pairs(e)}):
        if here == source:
            (group,) = (
                g for (a, b), g in groups.items() if a == place and target in mesh.meshes[b].ranks
            )
            dist.send(greeting, target, group=group)
        elif here == target:
            (group,) = (
                g for (a, b), g in groups.items() if b == place and source in mesh.meshes[a].ranks
            )
            dist.recv(greeting, source, group=group)
    return groups
