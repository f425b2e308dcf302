"""The communicator: torch's calls as operations of gloo, checked and given to a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from planner.runtime.process.groups.sent_types import SENT
from planner.runtime.process.groups.staged.host import Host, check, real, shown
from planner.runtime.process.groups.staged.queue import Queue, Stuck, Work, named

NAME = "staged"

_DATA, _TOLD = 0, 1
"""Gloo's tags: of a message, and of what is told ahead of it."""
_POLL_S = 0.0005
"""Seconds between two looks for a rank to connect to."""

Pair = tuple[int, int]
"""A rank that sends and one that receives, by their numbers in the group."""

Run = Callable[[list[Tensor], list[Tensor]], None]
"""Runs a collective on the host: it is given the outputs and the inputs."""

# (torch's annotations have every call in several forms; those without options go through these.)
_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo


class _Message(NamedTuple):
    """A send or a receive; `ready` is `Host.ready` of its tensor."""

    pair: Pair
    tensor: Tensor
    ready: Any


class Staged(_ProcessGroup):
    """A communicator; `ranks` are the global numbers of its ranks, empty for all.

    Mutable: what it was given and has not ended, and which of its ranks are connected.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(rank, size)
        self._here, self._size, self._name, self._store = rank, size, name, store
        self._ranks, self._limit = tuple(ranks) or tuple(range(size)), timeout
        self._gloo = _Gloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        self._queue = Queue(store, ranks=self._ranks, here=rank, limit=timeout)
        self._host = Host()
        self._connected: set[Pair | None] = set()
        self._batch: list[_Message] | None = None

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name that functional collectives find it by."""
        return self._name

    def shutdown(self) -> None:
        """End the thread once all that was given has ended."""
        self._queue.close()

    # -- connecting ---------------------------------------------------------------------

    def _connect(self, pairs: Sequence[Pair | None]) -> None:
        """Wait for the other end of each pair that is new; None: for all ranks."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._connected]
        awaited = {}
        for pair in new:
            name = "all" if pair is None else f"{pair[0]}>{pair[1]}"
            self._store.set(f"here/{name}/{self._here}", "1")
            for other in set(pair or range(self._size)) - {self._here}:
                awaited[f"here/{name}/{other}"] = self._ranks[other]
        until = time.monotonic() + self._limit.total_seconds()
        while awaited and not self._store.check(list(awaited)):
            if time.monotonic() > until:
                missing = sorted({r for k, r in awaited.items() if not self._store.check([k])})
                raise self._queue.stuck(
                    f"was to connect rank {self._ranks[self._here]} with {named(missing)}, "
                    f"whose host waits elsewhere"
                )
            time.sleep(_POLL_S)
        self._connected.update(new)

    # -- messages -----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send to a rank; the tag means nothing."""
        return self._message((self._here, dst), tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Receive from a rank; the tag means nothing."""
        return self._message((src, self._here), tensors)

    def _message(self, pair: Pair, tensors: Sequence[Tensor]) -> Work:
        (tensor,) = tensors
        check(tensor, "a message")
        message = _Message(pair, tensor, self._host.ready(tensor))
        if self._batch is not None:
            self._batch.append(message)
            return Work()
        return self._give([message])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, messages are collected; at the end they have run, all at once."""
        batch: list[_Message] = []
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
        if batch:
            self._give(batch).wait()

    def _give(self, messages: list[_Message]) -> Work:
        self._connect([message.pair for message in messages])
        texts = [self._spelled(message) for message in messages]
        return self._queue.give(" beside ".join(texts), lambda: self._exchange(messages))

    def _spelled(self, message: _Message) -> str:
        source, target = (self._ranks[end] for end in message.pair)
        way = f"receive from {source}" if message.pair[1] == self._here else f"send to {target}"
        return f"{way} {shown(message.tensor)}"

    def _exchange(self, messages: Sequence[_Message]) -> None:
        taken, announced, sent = [], [], []
        for message in messages:
            tensor, (source, target) = message.tensor, message.pair
            # Gloo may end a process for a message of another size than is expected.
            told = torch.tensor([SENT.index(tensor.dtype), tensor.numel()])
            if source == self._here:
                data = self._host.copy_of(tensor, message.ready)
                announced.append((self._gloo.send([told], target, _TOLD), told))
                sent.append((self._gloo.send([data], target, _DATA), data))
            else:
                heard = torch.empty_like(told)
                announced.append((self._gloo.recv([heard], source, _TOLD), heard))
                taken.append((message, told, heard))
        # (By pairs: gloo reads a tensor until it has left.)
        for work, _ in announced:
            work.wait(self._limit)
        received = [(self._receive(*each), each[0]) for each in taken]
        for work, _ in sent:
            work.wait(self._limit)
        for (work, data), message in received:
            work.wait(self._limit)
            self._host.put_back(data, message.tensor, message.ready)

    def _receive(self, message: _Message, told: Tensor, heard: Tensor) -> tuple[Any, Tensor]:
        """Begin to receive a message on the host, if what was heard of it is what was to be."""
        tensor, (source, target) = message.tensor, message.pair
        if not torch.equal(told, heard):
            dtype, count = heard.tolist()
            raise Stuck(
                f"rank {self._ranks[source]} sends {count} of {SENT[dtype]} where rank "
                f"{self._ranks[target]} receives {shown(tensor)}: they have messages in "
                "different orders"
            )
        data = tensor.detach() if message.ready is None else torch.empty_like(tensor, device="cpu")
        return self._gloo.recv([data], source, _DATA), data

    # -- collectives --------------------------------------------------------------------

    def _collective(
        self,
        kind: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        run: Run,
        *,
        is_even: bool = True,
        takes_complex: bool = False,
    ) -> Work:
        """Give an operation of all ranks, which is not `is_even` where each gives its own size."""
        for tensor in (*outputs, *inputs):
            check(tensor, kind, takes_complex=takes_complex)
        self._connect([None])
        events = {id(tensor): self._host.ready(tensor) for tensor in (*outputs, *inputs)}
        what = f"{kind} {', '.join(map(shown, inputs))}" if is_even else kind

        def run_here() -> None:
            self._agree(what)
            held = {id(t): self._host.copy_of(t, events[id(t)]) for t in inputs}
            # (What is reduced in place is an input and an output.)
            made = [
                held[id(t)] if id(t) in held else torch.empty_like(t, device="cpu") for t in outputs
            ]
            run(made, [held[id(t)] for t in inputs])
            for host, tensor in zip(made, outputs, strict=True):
                self._host.put_back(host, tensor, events[id(tensor)])

        return self._queue.give(what, run_here)

    def _agree(self, what: str) -> None:
        """Raise Stuck unless all ranks run the same; for some of it gloo would end the process."""
        own = torch.zeros(256, dtype=torch.uint8)
        text = what.encode()[: len(own)]
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in self._ranks]
        self._gloo.allgather([every], [own]).wait(self._limit)
        for rank, other in zip(self._ranks, every, strict=True):
            if not torch.equal(other, own):
                theirs = bytes(other.tolist()).rstrip(b"\0").decode(errors="replace")
                raise Stuck(
                    f"rank {self._ranks[self._here]} is at {what} where rank {rank} is at {theirs}"
                )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduce in place."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            for tensor in outputs:
                self._reduce(tensor, opts.reduceOp)

        return self._collective("all_reduce", tensors, tensors, run, takes_complex=True)

    allreduce_coalesced = allreduce

    def _reduce(self, tensor: Tensor, how: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM) if how == ReduceOp.AVG else how
        self._gloo.allreduce([real(tensor)], options).wait(self._limit)
        if how == ReduceOp.AVG:
            tensor /= self._size

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Give all ranks a rank's tensor."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            self._gloo.broadcast(real(outputs[0]), opts.rootRank).wait(self._limit)

        return self._collective("broadcast", tensors, tensors, run, takes_complex=True)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather tensors, each into one."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            for whole, part in zip(outputs, inputs, strict=True):
                pieces = list(whole.view(self._size, *part.shape).unbind(0))
                self._gloo.allgather([pieces], [part]).wait(self._limit)

        return self._collective("all_gather", outputs, inputs, run)

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> Work:
        """Gather a tensor into one."""
        return self.all_gather_single_coalesced([output], [part])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Gather a tensor into a list."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            self._gloo.allgather([outputs], inputs).wait(self._limit)

        return self._collective("all_gather", outputs[0], inputs, run)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Work:
        """Reduce tensors, of which each rank gets its part."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            for piece, whole in zip(outputs, inputs, strict=True):
                total = whole.clone()
                self._reduce(total, opts.reduceOp)
                piece.copy_(total.view(self._size, *piece.shape)[self._here])

        return self._collective("reduce_scatter", outputs, inputs, run)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> Work:
        """Reduce a tensor, of which each rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Give each rank its part; get one from each."""

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            work = self._gloo.alltoall_base(
                outputs[0], inputs[0], list(output_sizes), list(input_sizes)
            )
            work.wait(self._limit)

        return self._collective("all_to_all", [output], [whole], run, is_even=False)

    def barrier(self, opts: Any = None) -> Work:
        """End on no rank before all have begun."""
        return self._collective("barrier", (), (), lambda outputs, inputs: None)

    # As releases before torch 2.13 call them.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def register() -> None:
    """Make the backend known to `torch.distributed`."""
    if NAME in dist.Backend.backend_list:
        return

    def create(settings: Any, options: Any) -> Any:
        return Staged(
            settings.store,
            rank=settings.group_rank,
            size=settings.group_size,
            timeout=settings.timeout,
            name=settings.group_id,
            ranks=settings.global_ranks_in_group,
        )

    # (Typed for makers that return a part of a group; torch takes groups too.)
    maker: Any = create
    dist.Backend.register_backend(NAME, maker, extended_api=True, devices=["cpu", "cuda"])
