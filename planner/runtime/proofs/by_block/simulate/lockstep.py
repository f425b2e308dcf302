"""Ranks simulated in one process, in lock step: a collective runs when all of its group are at it.

Each rank is a thread, of which one runs at a time, in the order of the ranks, until it comes to a
collective. There it waits. When all ranks of the group wait, what they brought is compared (kind,
reduction, shapes, dtype) and the collective runs. Nothing else is stood in for: the runtime's own
collectives ask PyTorch for a group by its name, and get one of these.

    rank 0  ops ... all_reduce@tp |                      | ops ... end
    rank 1                        | ops ... all_reduce@tp|             ops ... end

Where ranks of a group bring different collectives, or one ends while others wait, `OutOfStep`
names them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

from planner.language.layout.process_mesh import ProcessMesh

T = TypeVar("T")

# Typed loosely: not all of its names are in PyTorch's stubs.
_c10d: Any = _distributed_c10d

_worlds = count()


class OutOfStep(Exception):
    """Ranks of one group came to different collectives, or some never came; names the ranks."""


class Call(NamedTuple):
    """What a rank brings to its group; equal on all of them."""

    axis: str
    kind: str
    how: str
    """The reduction; empty where nothing is reduced."""
    shape: tuple[int, ...]
    """Of what this rank gives."""
    dtype: str

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        return f"{self.kind}{how} of {self.dtype} {list(self.shape)}"


class _Ends(NamedTuple):
    """What a rank gives to a collective, and where the result goes."""

    gives: Tensor
    takes: Tensor
    sent: tuple[int, ...] = ()
    """In an all-to-all of unequal parts: entries of dim 0 for each rank; none: equal ones."""
    got: tuple[int, ...] = ()
    """Those from each rank."""


@dataclass(kw_only=True)
class _Rank:
    """A rank's thread and where it stands. Mutable: it moves on.

    Attributes:
        may_run: released when it is the rank's turn.
        calls: the collectives that it has come to, in order.
        waits: what it waits for; None while it may run.
        is_done: whether its body has ended.
        result: what its body returned.
        error: what its body raised.
    """

    may_run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    calls: list[Call] = field(default_factory=list)
    waits: tuple[_Line, Call, _Ends] | None = None
    """Its group, what it brings, and what it gives and where the result goes."""
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _Line:
    """The ranks of one group."""

    axis: str
    ranks: tuple[int, ...]


class LockStep:
    """Ranks of a mesh, simulated. Mutable: the ranks' states; use it in a ``with``."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """`mesh` has the axes along which ranks exchange."""
        self.mesh = mesh
        self._ranks = {rank: _Rank() for rank in mesh.ranks}
        self._turn_over = threading.Semaphore(0)
        self._stopped = False
        self._groups: dict[int, dict[str, SimulatedGroup | None]] = {r: {} for r in mesh.ranks}
        world = next(_worlds)
        for axis in mesh.axes:
            for ranks in mesh.groups(axis):
                line = _Line(axis, ranks)
                for number, rank in enumerate(ranks):
                    group = None
                    if len(ranks) > 1:
                        name = f"simulated {world} {axis} of rank {rank}"
                        group = SimulatedGroup(self, line, rank, number, name)
                    self._groups[rank][axis] = group

    def __enter__(self) -> LockStep:
        """Make the groups known to PyTorch."""
        for group in self._all_groups():
            _c10d._register_process_group(group.group_name, group)
        return self

    def __exit__(self, *failure: Any) -> None:
        """Forget them."""
        for group in self._all_groups():
            _c10d._unregister_process_group(group.group_name)

    def _all_groups(self) -> list[SimulatedGroup]:
        return [g for by_axis in self._groups.values() for g in by_axis.values() if g is not None]

    def groups(self, rank: int) -> dict[str, Any]:
        """Return a rank's group along each axis; None where it is alone."""
        return dict(self._groups[rank])

    def calls(self, rank: int) -> tuple[Call, ...]:
        """Return the collectives that a rank has taken part in so far, in order."""
        return tuple(self._ranks[rank].calls)

    def run(self, body: Callable[[int], T]) -> dict[int, T]:
        """Return what ``body(rank)`` returns on each rank.

        Raises OutOfStep, or the first error of a rank with the rank noted on it.
        """
        threads = []
        self._stopped = False
        for rank, state in self._ranks.items():
            state.is_done, state.result, state.error, state.waits = False, None, None, None
            thread = threading.Thread(target=self._life, args=(rank, body), daemon=True)
            threads.append(thread)
            thread.start()
        try:
            self._play()
        finally:
            # Threads that wait for their turn wake up, see that it is over, and end. Their
            # semaphores have been released too often by then, so new ones take their place.
            self._stopped = True
            for state in self._ranks.values():
                state.may_run.release()
            for thread in threads:
                thread.join()
            self._turn_over = threading.Semaphore(0)
            for state in self._ranks.values():
                state.may_run = threading.Semaphore(0)
        results = {rank: state.result for rank, state in self._ranks.items()}
        for state in self._ranks.values():
            state.result = None
        return results

    def _life(self, rank: int, body: Callable[[int], Any]) -> None:
        state = self._ranks[rank]
        state.may_run.acquire()
        if self._stopped:
            return
        try:
            state.result = body(rank)
        except BaseException as error:  # handed to the thread that plays
            error.add_note(f"on simulated rank {rank}")
            state.error = error
        state.is_done = True
        self._turn_over.release()

    def _play(self) -> None:
        """Let each rank run in turn until all are done."""
        while True:
            ready = [s for s in self._ranks.values() if not s.is_done and s.waits is None]
            # A single thread runs at a time, so the ranks' states need no lock.
            for state in ready:
                state.may_run.release()
                self._turn_over.acquire()
                if state.error is not None:
                    raise state.error
            waiting = {r: s.waits for r, s in self._ranks.items() if s.waits is not None}
            if not waiting:
                return
            if not self._meet(waiting):
                raise OutOfStep(self._why_stuck(waiting))

    def _meet(self, waiting: dict[int, Any]) -> bool:
        """Run the collectives whose groups are complete; whether there were any."""
        met = False
        # Ranks may wait in different groups; a group runs once all of its ranks are at it.
        for line in dict.fromkeys(waits[0] for waits in waiting.values()):
            here = [waiting.get(rank) for rank in line.ranks]
            brought = [waits for waits in here if waits is not None and waits[0] == line]
            # A rank of the group still runs, has ended, or waits in another group.
            if len(brought) < len(line.ranks):
                continue
            _check_alike(line, [call for _, call, _ in brought])
            _check_parts(line, [ends for _, _, ends in brought])
            _exchange(brought[0][1], [ends for _, _, ends in brought])
            for rank in line.ranks:
                self._ranks[rank].waits = None
            met = True
        return met

    def _why_stuck(self, waiting: dict[int, Any]) -> str:
        rank, (line, call, _) = next(iter(waiting.items()))
        for other in line.ranks:
            state = self._ranks[other]
            if state.is_done:
                return (
                    f"rank {rank} waits on {line.axis} for {call}, and rank {other} has ended "
                    f"after {len(state.calls)} collectives ({len(self._ranks[rank].calls)} there)"
                )
            if other in waiting and waiting[other][0] != line:
                theirs, its_call, _ = waiting[other]
                return (
                    f"rank {rank} waits on {line.axis} for {call}, and rank {other} on "
                    f"{theirs.axis} for {its_call}"
                )
        return f"rank {rank} waits on {line.axis} for {call}, which never comes"

    def wait(self, line: _Line, rank: int, call: Call, ends: _Ends) -> None:
        """Bring a collective and wait for the others; a rank's own thread calls it."""
        state = self._ranks[rank]
        if self._stopped:
            raise OutOfStep(f"{call} outside of a run")
        state.calls.append(call)
        state.waits = (line, call, ends)
        self._turn_over.release()
        state.may_run.acquire()
        if self._stopped:
            raise OutOfStep("another rank failed")


def _check_alike(line: _Line, calls: Sequence[Call]) -> None:
    for rank, call in zip(line.ranks, calls, strict=True):
        if call != calls[0]:
            raise OutOfStep(
                f"on {line.axis} rank {line.ranks[0]} runs {calls[0]} and rank {rank} {call}"
            )


def _check_parts(line: _Line, ends: Sequence[_Ends]) -> None:
    """Hold what each rank sends to each other against what that one expects."""
    for number, mine in enumerate(ends):
        for other, theirs in enumerate(ends):
            sent, got = mine.sent[other : other + 1], theirs.got[number : number + 1]
            if sent != got:
                raise OutOfStep(
                    f"on {line.axis} rank {line.ranks[number]} sends {list(sent)} rows to rank "
                    f"{line.ranks[other]}, which expects {list(got)}"
                )


@torch.no_grad()
def _exchange(call: Call, ends: Sequence[_Ends]) -> None:
    """Do what the network does: from what each rank gives to what each takes."""
    # Copies, as an all-reduce writes its result where its input is.
    given = [each.gives.clone() for each in ends]
    if call.kind in ("all_reduce", "reduce_scatter"):
        total = given[0]
        for term in given[1:]:
            total = torch.maximum(total, term) if call.how == "max" else total + term
        pieces = [total] * len(ends)
        if call.kind == "reduce_scatter":
            # Piece r of dim 0 for rank r.
            pieces = list(total.reshape(len(ends), *ends[0].takes.shape))
    elif call.kind == "all_gather":
        pieces = [torch.cat([each.reshape(-1) for each in given])] * len(ends)
    else:
        # parts[a][b]: what rank a gives to rank b.
        parts = [
            x.split(list(each.sent)) if each.sent else x.reshape(len(ends), -1)
            for each, x in zip(ends, given, strict=True)
        ]
        pieces = [torch.cat([each[number] for each in parts]) for number in range(len(ends))]
    for each, piece in zip(ends, pieces, strict=True):
        each.takes.detach().copy_(piece.reshape(each.takes.shape))


_REDUCTIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}


def _reduction(options: Any) -> str:
    for operation, name in _REDUCTIONS.items():
        if options.reduceOp == operation:
            return name
    raise NotImplementedError(f"the simulated network can't reduce by {options.reduceOp}")


# Typed loosely: the methods' names and arguments are those of one PyTorch or another.
_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):
    """One rank's view of a group. PyTorch 2.13 has other names for three methods than 2.11."""

    def __init__(self, world: LockStep, line: _Line, rank: int, number: int, name: str) -> None:
        super().__init__(number, len(line.ranks))
        self._world, self._line, self._global_rank = world, line, rank
        self._number, self._name = number, name

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._number

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._line.ranks)

    def getBackendName(self) -> str:
        """Return what messages call it."""
        return "simulated"

    @property
    def pg_name(self) -> str:
        """The name it is asked for by."""
        return self._name

    @property
    def group_name(self) -> str:
        """The name it is asked for by."""
        return self._name

    def _join(self, kind: str, how: str, *ends: Any) -> Any:
        given = _Ends(*ends)
        dtype = str(given.gives.dtype).removeprefix("torch.")
        call = Call(self._line.axis, kind, how, tuple(given.gives.shape), dtype)
        self._world.wait(self._line, self._global_rank, call, given)
        future: Future[Any] = Future()
        future.set_result([given.takes])
        return _c10d._create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce in place."""
        (tensor,) = tensors
        return self._join("all_reduce", _reduction(opts), tensor, tensor)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> Any:
        """Bring together what each rank gives."""
        (output,), (own,) = outputs, given
        return self._join("all_gather", "", own, output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any
    ) -> Any:
        """Reduce, and give each rank its piece."""
        (output,), (own,) = outputs, given
        return self._join("reduce_scatter", _reduction(opts), own, output)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, takes: Any, gives: Any, opts: Any = None
    ) -> Any:
        """Send a part to each rank, equal ones or such as ranks agree on."""
        sizes = [tuple(map(int, each or ())) for each in (gives, takes)]
        if all(len(set(each)) < 2 for each in sizes):
            return self._join("all_to_all", "", given, output)
        return self._join("all_to_all", "", given, output, *sizes)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
