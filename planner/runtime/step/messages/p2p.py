"""Tensors between pipeline ranks: posted early, never blocking, in an order known to both ends.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.language.graph.batch_split import BatchSplit
from planner.language.layout.boxes import sizes, slices
from planner.language.lowering.routes import Routes
from planner.language.lowering.wiring import Edge
from planner.language.plan import Plan
from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.runtime.process.groups.gloo_threads import give_way_to_sockets
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.process.groups.sent_types import view_to_send
from planner.runtime.step.messages.directions import open_directions

_TAG_RANGE = 2**31 - 1


class Message(NamedTuple):
    """A transfer of one microbatch's tensor: an edge's value forward, or its gradient back."""

    edge: int
    microbatch: int
    is_grad: bool


def messages(job: Job, edges: Iterable[Edge], *, incoming: bool) -> list[Message]:
    """Return what a job needs from other stages, or what it makes for them, in sending order.

    Values arrive at a consumer's forward, gradients at a producer's backward.
    """
    if job.kind is JobKind.BACKWARD_WEIGHT:
        return []
    is_grad = job.kind is not JobKind.FORWARD
    # The consumer end: what a forward takes and what a backward sends back. The other two cases are
    # at the producer.
    at_consumer = incoming is not is_grad
    return [
        Message(edge.index, job.microbatch_index, is_grad)
        for edge in edges
        if (edge.consumer if at_consumer else edge.producer) == job.stage_index
        and (edge.requires_grad or not is_grad)
    ]


@dataclass(frozen=True, slots=True)
class Leg:
    """What this rank sends to one other rank for a message, or gets from it.

    `peer` is the other's number in `group`; `where` lies the part in the tensor this rank
    has or needs, None if it is all of that.
    """

    rank: int
    peer: int
    group: dist.ProcessGroup
    shape: tuple[int, ...]
    where: tuple[slice, ...] | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """How messages of one edge, direction and cut go from pp rank `source` to `target`.

    `shape` is what this rank has or needs of the tensor.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    legs: tuple[Leg, ...]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A message on its way here: its shape, and the parts of it being received."""

    shape: tuple[int, ...]
    parts: tuple[tuple[dist.Work, Tensor, Leg], ...]

    def wait(self) -> Tensor:
        """Return the message's tensor when all of it is here.

        On a GPU the waiting is the stream's. Buffers are allocated, waited for and used on one
        stream, the one that jobs run on, so their memory can't be given away too early.
        """
        for work, _, _ in self.parts:
            work.wait()
        _, first, leg = self.parts[0]
        # A single part that is the whole: no copy.
        if leg.where is None:
            return first
        whole = first.new_empty(self.shape)
        for _, part, leg in self.parts:
            whole[leg.where] = part
        return whole


class Sending(NamedTuple):
    """A part of a message that may still be read: what it is of, and which rank gets it."""

    work: dist.Work
    part: Tensor
    message: Message
    rank: int


class Post:
    """Sends and receives the messages of one pp rank for one run through the table.

    Mutable: it holds what is under way. `put` never blocks; `get` waits for one message.
    `bytes_sent` counts what left for other ranks since it was made.

    What was sent is kept until it has left. Gloo does not tell before it is waited for; but who
    sends a message has what its own jobs up to that one needed, so with the message at hand
    waiting for those is no waiting.
    """

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        edges: tuple[Edge, ...],
        plan: Plan,
        *,
        buckets: Sequence[tuple[Edge, ...]] = (),
    ) -> None:
        """`buckets` are the same edges with the shapes of each of the plan's buckets."""
        self._mesh, self._edges = mesh, edges
        self._by_bucket, self._bucket = (edges, *buckets), 0
        self._here, self._rank = mesh.rank("pp"), mesh.global_rank
        self._on_cpu = mesh.device.type == "cpu"
        self._home = schedule.stage_to_pp_rank
        self._all_routes = tuple(Routes(plan=plan) for _ in self._by_bucket)
        self._full = plan.split
        self._cuts: tuple[tuple[int, ...], ...] = ()
        self._groups = open_directions(mesh, edges, self._home)
        # Positions in a peer's row: of the job that takes a message of ours, and of the job that
        # makes a message for us. `_forget` compares them.
        self._taken_at: dict[Message, int] = {}
        self._made_at: dict[Message, int] = {}
        # By peer, what it sends here in a step. Both ends read this order off the job table.
        self._orders = {
            source: self._order(schedule, source)
            for source in range(schedule.pp)
            if source != self._here
        }
        self._waiting: dict[int, deque[Message]] = {}
        self._posted: dict[Message, Arriving] = {}
        self._sending: deque[Sending] = deque()
        self._local: dict[Message, Tensor] = {}
        self._dtypes = tuple(getattr(torch, edge.dtype) for edge in edges)
        self._views = tuple(view_to_send(dtype) for dtype in self._dtypes)
        self._crossings: dict[tuple[int, bool, tuple[int, ...], int], Crossing] = {}
        self.waiting_for: Message | None = None
        self.bytes_sent = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def _order(self, schedule: Schedule, source: int) -> tuple[Message, ...]:
        """What pp rank `source` sends here in one step, in order; notes at which of its jobs it
        makes that, and takes what is sent from here.
        """
        order = []
        for position, job in enumerate(schedule.jobs[source]):
            for message in messages(job, self._edges, incoming=True):
                if self._ends(message)[0] == self._here:
                    self._taken_at[message] = position
            for message in messages(job, self._edges, incoming=False):
                if self._ends(message)[1] == self._here:
                    self._made_at[message] = position
                    order.append(message)
        return tuple(order)

    def _ends(self, message: Message) -> tuple[int, int]:
        """The pp ranks a message goes from and to."""
        edge = self._edges[message.edge]
        ends = self._home[edge.producer], self._home[edge.consumer]
        return ends[::-1] if message.is_grad else ends

    def _crossing(self, message: Message) -> Crossing:
        """Return how a message of this step goes, worked out once for each cut."""
        edge, microbatch, is_grad = message
        key = (edge, is_grad, self._cuts[microbatch], self._bucket)
        if key not in self._crossings:
            self._crossings[key] = self._find_crossing(*key)
        return self._crossings[key]

    def _find_crossing(
        self, edge_index: int, is_grad: bool, cut: tuple[int, ...], bucket: int
    ) -> Crossing:
        edge, routes = self._by_bucket[bucket][edge_index], self._all_routes[bucket]
        source, target = self._ends(Message(edge_index, 0, is_grad))
        # The tensor on this rank, in coordinates of the whole microbatch's tensor; parts lie
        # inside.
        held = routes.box(edge, cut, self._rank)
        legs = []
        for a, b, box in routes.parts(edge, cut, is_grad=is_grad):
            # Stages of one pp rank hand tensors over in place; other pairs of ranks do not concern
            # it.
            if source == target or self._rank not in (a, b):
                continue
            other, group = (b if a == self._rank else a), self._groups[source, target]
            where = None if box == held else slices(box, held)
            peer = dist.get_group_rank(group, other)
            legs.append(Leg(rank=other, peer=peer, group=group, shape=sizes(box), where=where))
        return Crossing(source=source, target=target, shape=sizes(held), legs=tuple(legs))

    def open(self, *, with_grads: bool, split: BatchSplit | None = None, bucket: int = 0) -> None:
        """Begin a step; without gradients when it is forward only.

        `split` is how the step's batch is cut; None for the plan's full batch. `bucket` is which
        of its shapes it has.
        """
        self._bucket = bucket
        # Both ends compute the shapes of messages from these sizes, so they need not be sent.
        self._cuts = (split or self._full).sizes
        self._waiting = {
            source: deque(m for m in order if with_grads or not m.is_grad)
            for source, order in self._orders.items()
        }

    def expect(self, wanted: Iterable[Message]) -> None:
        """Post the receives of what is wanted (and of what is due before it) unless posted."""
        for message in wanted:
            source, _ = self._ends(message)
            if source == self._here:
                continue
            queue = self._waiting[source]
            # All that the peer sends before it is posted too: NCCL matches receives to sends by
            # order.
            while message not in self._posted and queue:
                self._receive(queue.popleft())

    def _receive(self, message: Message) -> None:
        crossing, parts = self._crossing(message), []
        for leg in crossing.legs:
            # Both ends count the messages between them, so tags agree without being sent. (A tag is
            # a signed 32-bit integer.)
            buffer = torch.empty(
                leg.shape, dtype=self._dtypes[message.edge], device=self._mesh.device
            )
            tag = self._received[leg.rank] = (self._received[leg.rank] + 1) % _TAG_RANGE
            view = self._views[message.edge]
            taken = buffer if view is None else view(buffer)
            parts.append((leg.group.recv([taken], leg.peer, tag), buffer, leg))
        self._posted[message] = Arriving(crossing.shape, tuple(parts))

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
        self._forget(message, [leg.rank for _, _, leg in arriving.parts])
        return tensor

    def _forget(self, message: Message, ranks: Iterable[int]) -> None:
        """Let go what `ranks` of one pp rank took before they sent a message."""
        # The peer waits for the inputs of a job before it makes that job's message, so it has
        # received what it takes up to there: waiting for these sends returns at once. A full turn
        # of the deque keeps the order of the others.
        made_at = self._made_at[message]
        for _ in range(len(self._sending)):
            sending = self._sending.popleft()
            if sending.rank in ranks and self._taken_at[sending.message] <= made_at:
                sending.work.wait()
            else:
                self._sending.append(sending)

    def describe(self, message: Message) -> str:
        """Return what a message carries and who sends it, in words."""
        edge, crossing = self._edges[message.edge], self._crossing(message)
        what = f"{'the gradient of ' if message.is_grad else ''}{edge.tensor}"
        what += f" {list(crossing.shape)} of microbatch {message.microbatch}"
        senders = sorted(leg.rank for leg in crossing.legs)
        ranks = f"rank{'s' if len(senders) > 1 else ''} {', '.join(map(str, senders))}"
        return f"{what} from {ranks} (pp rank {crossing.source})"

    def put(self, message: Message, tensor: Tensor) -> None:
        """Hand a tensor on; it is kept alive until it has left."""
        # From the front, where the oldest are. (A gloo send does not tell; `_forget` frees those.)
        while self._sending and self._sending[0].work.is_completed():
            self._sending.popleft()
        crossing = self._crossing(message)
        if crossing.target == self._here:
            self._local[message] = tensor
            return
        tensor, view = tensor.detach(), self._views[message.edge]
        if tensor.is_conj() or tensor.is_neg():
            # Backends send what lies in memory, which is not conjugated or negated yet.
            tensor = tensor.resolve_conj().resolve_neg()
        # Gloo's threads read that the taker is ready, and write what it is ready for.
        if self._on_cpu:
            give_way_to_sockets()
        for leg in crossing.legs:
            # A slice is copied: backends send contiguous memory alone.
            part = (tensor if leg.where is None else tensor[leg.where]).contiguous()
            part = part if view is None else view(part)
            tag = self._sent[leg.rank] = (self._sent[leg.rank] + 1) % _TAG_RANGE
            work = leg.group.send([part], leg.peer, tag)
            self._sending.append(Sending(work, part, message, leg.rank))
            self.bytes_sent += part.nbytes
        if self._on_cpu:
            give_way_to_sockets()

    def close(self) -> None:
        """End a step: wait until everything sent has left. Everything posted was taken."""
        while self._sending:
            sending = self._sending.popleft()  # by name: its part must live until it has left
            sending.work.wait()
        assert not self._posted, f"received but not used: {list(self._posted)}"
        assert not self._local, f"handed over but not used: {list(self._local)}"
