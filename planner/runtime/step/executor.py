"""Runs a job table: whatever schedule made it, and for one stage or many.

For each job of this rank in turn, the receives of the jobs just ahead are posted, the job
runs, and what it made is sent on. A forward keeps its input leaves and the gradient edges
of its outputs, nothing else; the record dies with the last job that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.language.lowering.wiring import Edge
from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.runtime.batches.inputs.feed import Feed
from planner.runtime.process.recorder import job_name
from planner.runtime.process.spans import Spans
from planner.runtime.process.watchdog import Status
from planner.runtime.stage.beside_collectives import BesideCollectives
from planner.runtime.stage.host_activations import ActivationsOnHost, Incoming
from planner.runtime.stage.stage import StageModule
from planner.runtime.stage.weight_grads import WeightQueue
from planner.runtime.step.device_marks import DeviceMarks
from planner.runtime.step.messages.p2p import Message, Post, messages
from planner.timeline import REMAKE, WAIT, lane_from

_NOTHING = nullcontext()

_SPELLED = {
    JobKind.FORWARD: "forward",
    JobKind.FULL_BACKWARD: "backward",
    JobKind.BACKWARD_INPUT: "input gradient",
    JobKind.BACKWARD_WEIGHT: "weight gradient",
}


def describe_job(job: Job) -> str:
    """Return a job in words, beside its cell in the table."""
    what = f"{_SPELLED[job.kind]} of stage {job.stage_index}, microbatch {job.microbatch_index}"
    return f"{job} ({what})"


@dataclass(frozen=True, slots=True)
class Live:
    """What a forward leaves for its backward.

    `leaves` are the incoming tensors that need a gradient, by edge; of an input that is offloaded,
    the object that receives its gradient. `roots` are the outputs' places in the autograd graph
    (None for an output without gradient): they hold no tensor, so an output's memory goes once it
    is sent. `loss` is the last root of a loss stage. `make_again` runs the stage's last block
    again, where it is recomputed.
    """

    leaves: tuple[tuple[Edge, Tensor | Incoming], ...]
    roots: tuple[GradientEdge | None, ...]
    loss: GradientEdge | None
    make_again: Callable[[], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that are called at points of a step, on this rank, in the order of its jobs.

    `after_forward(stage, num_samples)` is called after a forward in training,
    `before_backward(stage, is_last)` before a job that makes weight gradients,
    `after_gradients(stage)` once all of a stage's weight gradients are complete.
    """

    after_forward: Callable[[int, int], None]
    before_backward: Callable[[int, bool], None]
    after_gradients: Callable[[int], None]


class Executor:
    """Runs this pp rank's row of a table. Mutable: it holds the microbatches in flight."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, StageModule],
        edges: tuple[Edge, ...],
        post: Post,
        hooks: Hooks,
        spans: Spans,
        weight_queue: WeightQueue | None = None,
        beside: BesideCollectives | None = None,
        away: ActivationsOnHost | None = None,
        lookahead: int,
        marks: DeviceMarks | None = None,
    ) -> None:
        """`weight_queue` is where the stages' programs defer weight gradients; without
        one (ZeRO) an I job makes them all and a W job has nothing left to do. `beside` has those
        that wait for a collective of the backward, which no W job makes. `lookahead` is how
        many jobs ahead receives are posted (`Plan.receive_ahead`). `marks` are of a device that
        works behind the host.

        A backward whose input gradient leaves the rank sends it before weight gradients that
        were deferred are made, so that the rank before waits less for it. In all but the last
        those are the stage's first block's: enough to hide a message, and when that block's
        turn comes the activations of the others are gone, so it takes no memory. In the last,
        which the rank before has nothing left to do but to wait for, they are the whole stage's.
        """
        self.schedule = schedule
        self.jobs = schedule.jobs[pp_rank]
        self.live: dict[tuple[int, int], Live] = {}
        self._stages, self._edges, self._post, self._hooks = stages, edges, post, hooks
        self._lookahead, self._pp_rank, self._marks = lookahead, pp_rank, marks
        self._queue, self._spans, self._away = weight_queue, spans, away
        self._beside = beside
        # What spans are called: put together once, not at every job.
        self._waits = {
            (edge.index, is_grad): (
                f"wait {'grad ' if is_grad else ''}{edge.tensor}",
                edge.producer if is_grad else edge.consumer,
                lane_from(schedule.stage_to_pp_rank[edge.consumer if is_grad else edge.producer]),
            )
            for edge in edges
            for is_grad in (False, True)
        }
        self._spelled = {job: (str(job.kind), job_name(job)) for job in self.jobs}
        self._progress = 0
        self._phase: str | None = None
        self._current: Job | None = None
        # Products of these microbatches defer their weight gradients to a W job. The forward has to
        # choose that already: it decides which autograd function a product becomes.
        self._split = frozenset(
            (job.stage_index, job.microbatch_index)
            for job in self.jobs
            if job.kind is JobKind.BACKWARD_INPUT and weight_queue is not None
        )
        # Incoming messages of each job, by position in the row: what `lookahead` posts.
        self._taken = tuple(messages(job, edges, incoming=True) for job in self.jobs)
        # Of a split backward, the job that completes weight gradients: W where they are deferred, I
        # where it makes all of them (ZeRO).
        apart = JobKind.BACKWARD_WEIGHT if weight_queue is not None else JobKind.BACKWARD_INPUT
        # After a stage's last such job its gradients are complete, so their sum over replicas can
        # run beside the jobs of the rank's other stages.
        last: dict[int, int] = {}
        for position, job in enumerate(self.jobs):
            if job.kind in (JobKind.FULL_BACKWARD, apart):
                last[job.stage_index] = position
        self._last_gradients = frozenset(last.values())
        # Full backwards that send early. True: the weight gradients of all blocks are deferred
        # until the message has left; false: those of the first block.
        self._sends_first = {
            (job.stage_index, job.microbatch_index): position in self._last_gradients
            for position, job in enumerate(self.jobs)
            if weight_queue is not None and self._is_waited_for(job)
        }
        # (A later job of a stage replaces the earlier: the row is in the order of execution.)
        forwards = {j.stage_index: j for j in self.jobs if j.kind is JobKind.FORWARD}
        self._last_forwards = frozenset(forwards.values())

    def _is_waited_for(self, job: Job) -> bool:
        """Whether a backward makes both gradients, and another rank needs the input's."""
        home = self.schedule.stage_to_pp_rank
        return (
            job.kind is JobKind.FULL_BACKWARD
            # (What is recomputed lives for a block; deferred, it would live for the stage.)
            and not self._stages[job.stage_index].is_recomputed
            and any(
                home[self._edges[message.edge].producer] != self._pp_rank
                for message in messages(job, self._edges, incoming=False)
            )
        )

    def train(self, feed: Feed) -> list[Tensor]:
        """Run every job; gradients accumulate in the stages' parameters.

        Returns the losses of the microbatches if this rank has the loss, detached, in
        microbatch order.
        """
        return self._run(range(len(self.jobs)), feed, with_grads=True)

    @torch.no_grad()
    def evaluate(self, feed: Feed) -> list[Tensor]:
        """Run the forward jobs alone, keeping no activation. Returns losses like `train`."""
        forwards = [i for i, job in enumerate(self.jobs) if job.kind is JobKind.FORWARD]
        return self._run(forwards, feed, with_grads=False)

    def _run(self, positions: Iterable[int], feed: Feed, *, with_grads: bool) -> list[Tensor]:
        # `ahead` stays `lookahead` jobs in front of the job that runs. A receive buffer exists from
        # then on, so looking farther ahead costs memory.
        order = list(positions)
        ahead = iter(order)
        if self._marks is not None:
            self._marks.next()  # those of steps before are done with
        losses: dict[int, Tensor] = {}
        self._post.open(with_grads=with_grads, split=feed.split, bucket=feed.bucket)
        # Receives are posted early, so that a message travels while earlier jobs compute.
        for position in islice(ahead, self._lookahead):
            self._post.expect(self._taken[position])
        for position in order:
            for coming in islice(ahead, 1):
                self._post.expect(self._taken[coming])
            job = self._current = self.jobs[position]
            self._progress += 1
            try:
                # In an evaluation nothing is saved for a backward, so nothing is offloaded.
                if self._away is not None and with_grads:
                    self._away.before(position)
                self._do(job, feed, losses, position in self._last_gradients)
                if self._away is not None and with_grads:
                    self._away.after(position)
                if self._marks is not None:
                    self._marks.add(job)
            except Exception as error:
                error.add_note(f"in job {describe_job(job)} on pp rank {self._pp_rank}")
                raise
        # What was sent must live until it has left, and the next step reuses the order of messages.
        self._post.close()
        self._current = None
        return [losses[m] for m in sorted(losses)]

    def _do(self, job: Job, feed: Feed, losses: dict[int, Tensor], is_last: bool) -> None:
        if job.kind is JobKind.FORWARD:
            self._forward(job, feed, losses)
            return
        if job.kind is not JobKind.BACKWARD_WEIGHT:
            self._backward(job, feed, is_last=is_last)
        # Without a queue (ZeRO) the I job made the weight gradients, and W has nothing to do.
        elif self._queue is not None:
            with self._computing(job):
                self._flush(job)
        if is_last:
            self._hooks.after_gradients(job.stage_index)

    def _forward(self, job: Job, feed: Feed, losses: dict[int, Tensor]) -> None:
        stage, m = self._stages[job.stage_index], job.microbatch_index
        wiring = stage.wiring
        leaves: list[tuple[Edge, Tensor | Incoming]] = []
        arrived = []
        for edge in wiring.incoming:
            # A stage's graph begins here: autograd can't walk across ranks, and stages of one rank
            # run their backwards as jobs of their own.
            tensor = self._get(Message(edge.index, m, False)).detach()
            # The leaf is where autograd leaves the gradient that goes back to the stage before.
            if edge.requires_grad and torch.is_grad_enabled():
                leaf, tensor = self._enter(job, tensor)
                leaves.append((edge, leaf))
            arrived.append(tensor)
        side_inputs = feed.side_inputs(job.stage_index, m)
        with self._computing(job), self._collecting(job), self._packing(job, side_inputs):
            outputs = stage(
                *arrived,
                *side_inputs,
                num_samples=feed.num_samples[m],
                is_last=job in self._last_forwards,
                after_first=self._after_first_block(job),
            )
        del arrived, side_inputs
        # Merged statistics of BatchNorm, and FSDP2, follow training alone.
        if torch.is_grad_enabled():
            self._hooks.after_forward(job.stage_index, feed.num_samples[m])
        for edge, index in zip(wiring.outgoing, wiring.output_of, strict=True):
            self._post.put(Message(edge.index, m, False), outputs[index].detach())
        if wiring.has_loss:
            # A copy: some losses lie in as much memory as what they are the mean of.
            losses[m] = outputs[-1].detach().clone()
        if torch.is_grad_enabled():
            # Edges into the graph, not outputs: their memory is free once they are sent.
            roots = tuple(get_gradient_edge(o) if o.requires_grad else None for o in outputs)
            loss = roots[-1] if wiring.has_loss else None
            sent = roots[:-1] if wiring.has_loss else roots
            again = stage.take_again()
            self.live[job.stage_index, m] = Live(tuple(leaves), sent, loss, again)

    def _backward(self, job: Job, feed: Feed, *, is_last: bool) -> None:
        m = job.microbatch_index
        wiring = self._stages[job.stage_index].wiring
        live = self.live.pop((job.stage_index, m))
        # The last block is recomputed while the gradient is still on its way: that fills a wait. A
        # stage with the loss alone waits for no gradient.
        if live.make_again is not None and live.roots:
            # Needs no gradient, so it need not wait for one; nor does it take memory that the
            # backward would not, which begins with this block.
            with self._computing(job, REMAKE), self._collecting(job):
                live.make_again()
        # It holds the block's inputs, which the backward lets go as it goes.
        live = replace(live, make_again=None)
        grads: list[Tensor | None] = [None] * len(live.roots)
        for edge, index in zip(wiring.outgoing, wiring.output_of, strict=True):
            if edge.requires_grad:
                grad = self._get(Message(edge.index, m, True))
                # A tensor that several later stages read: its gradient is the sum of theirs.
                total = grads[index]
                grads[index] = grad if total is None else total + grad
        pairs = [
            (root, grad)
            for root, grad in zip(live.roots, grads, strict=True)
            if root is not None and grad is not None
        ]
        if live.loss is not None:
            # d(batch loss) / d(loss of this part) is the part's weight, so sums over microbatches
            # and replicas are the gradient of the whole batch's mean.
            pairs.append((live.loss, feed.loss_weights[m]))
        sends_first = (job.stage_index, m) in self._sends_first
        # Without pairs no gradient reaches the stage: it ends before the first trained parameter.
        if pairs:
            self._hooks.before_backward(job.stage_index, is_last)
            with self._computing(job):
                with self._collecting(job):
                    _run_backward(tuple(r for r, _ in pairs), tuple(g for _, g in pairs))
                if self._beside is not None:
                    # Those whose collective was not run: no gradient got as far.
                    self._beside.make()
                if sends_first:
                    self._send_gradients(live, m)
                    self._flush(job)
        if not (pairs and sends_first):
            self._send_gradients(live, m)

    def _send_gradients(self, live: Live, microbatch: int) -> None:
        for edge, leaf in live.leaves:
            grad = leaf.grad
            # The rank before waits for a message, though this forward did not use its input.
            if grad is None:
                grad = torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf.zeros()
            self._post.put(Message(edge.index, microbatch, True), grad)

    def _flush(self, job: Job) -> None:
        assert self._queue is not None
        self._queue.flush((job.stage_index, job.microbatch_index))

    @property
    def job(self) -> Job | None:
        """The job in work; None between two steps."""
        return self._current

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say what a step does before or behind its row, where ranks wait for each other."""
        self._progress += 1
        self._phase = text
        try:
            yield
        finally:
            self._phase = None

    def status(self) -> Status:
        """Return what this rank is doing; called from the watchdog's thread.

        Of a device that works behind the host: what the device is doing.
        """
        passed, mark = (0, None) if self._marks is None else self._marks.next()
        # Each read once: the training thread changes them between two reads.
        job, phase, waiting = self._current, self._phase, self._post.waiting_for
        progress = self._progress + passed
        if mark is not None:
            text = f"job {describe_job(mark.job)}"
            if mark.message is not None:
                text += f", waiting for {self._post.describe(mark.message)}"
            return Status(progress, True, text, waits=mark.message is not None)
        if phase is not None:
            return Status(progress, True, phase, waits=True)
        if job is None:
            return Status(progress, False, "between two steps")
        text = f"job {describe_job(job)}"
        if waiting is not None:
            text += f", waiting for {self._post.describe(waiting)}"
        return Status(progress, True, text, waits=waiting is not None)

    def _get(self, message: Message) -> Tensor:
        name, stage, lane = self._waits[message.edge, message.is_grad]
        with self._spans.span(WAIT, name, stage, message.microbatch, lane=lane):
            tensor = self._post.get(message)
        if self._marks is not None and self._current is not None:
            edge = self._edges[message.edge]
            sender = edge.consumer if message.is_grad else edge.producer
            if self.schedule.stage_to_pp_rank[sender] != self._pp_rank:
                self._marks.add(self._current, message)
        return tensor

    def _computing(self, job: Job, kind: str | None = None) -> AbstractContextManager[Any]:
        """Name a job's computation for a profiler, and record when it ran, where either is on.

        `kind` is another than the job's for what it does ahead of its inputs.
        """
        if not self._spans.is_on:
            return _NOTHING
        spelled = self._spelled[job] if kind is None else (kind, job_name(job, kind))
        return self._spans.span(*spelled, job.stage_index, job.microbatch_index, is_job=True)

    def _enter(self, job: Job, tensor: Tensor) -> tuple[Tensor | Incoming, Tensor]:
        """Return where the gradient of an input is left, and the input for the stage."""
        if self._away is None or not self._away.travels(job):
            leaf = tensor.requires_grad_()
            return leaf, leaf
        incoming = Incoming(tensor)
        return incoming, incoming.entering(tensor)

    def _packing(self, job: Job, held: Iterable[Tensor]) -> AbstractContextManager[None]:
        """What autograd saves is packed where it goes to the host."""
        if self._away is None or not torch.is_grad_enabled() or not self._away.travels(job):
            return _NOTHING
        return self._away.packing(job, held)

    def _after_first_block(self, job: Job) -> Callable[[], None] | None:
        """Return what ends `_collecting` early in a forward."""
        # (True for a split backward, which is in no table of early sends.)
        puts_all_aside = self._sends_first.get((job.stage_index, job.microbatch_index), True)
        return None if puts_all_aside or self._queue is None else self._queue.stop

    def _collecting(self, job: Job) -> AbstractContextManager[None]:
        """Weight gradients are deferred where a W job makes them, or the job's own end."""
        place = job.stage_index, job.microbatch_index
        if (
            (place in self._split or place in self._sends_first)
            and self._queue is not None
            and torch.is_grad_enabled()
        ):
            return self._queue.collecting(place)
        return _NOTHING


def _run_backward(roots: tuple[GradientEdge, ...], grads: tuple[Tensor, ...]) -> None:
    """Run autograd's engine as `torch.autograd.backward` does, without its Python checks.

    They take longer than all else an executor does for a job; the engine itself checks again
    that each gradient has the shape and dtype of its root.
    """
    # keep_graph=False: each node frees what it saved as soon as it has run, which the memory model
    # counts on. No inputs named: gradients are accumulated into all leaves.
    Variable._execution_engine.run_backward(
        roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
