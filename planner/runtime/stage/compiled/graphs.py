"""Halves of a compiled block as CUDA graphs: the host starts a graph, not each of its kernels.

A graph reads and writes the memory that it was captured with, and tensors of a step come and go.
So what a half takes is copied to memory that stays, and what it gives is copied out of such memory:

    tensors --copy--> taken --graph--> given --copy--> tensors of their own
                parameters ---^

Parameters are read where they lie, so each block of a class has its graphs, of each size of
microbatches; what is taken and given is the class's, whose sizes have it in the same memory, as no
two of them run at once. As results are tensors like any other, microbatches in flight,
recomputation, offloads and W jobs hold them as they hold those of kernels
(docs/decisions/0042-cuda-graphs-of-blocks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planner.capture.diagnose import first_line
from planner.errors import PlanError
from planner.runtime.stage.compiled.kernels import Kernels

Replay = Callable[[], None]
"""Does again what a captured function did."""

Capture = Callable[[Callable[[], None]], Replay]
"""Runs a function, and captures what it starts; the function may be called several times."""


class CudaCapture:
    """Captures in CUDA graphs that have one pool of memory: no two of them run at once. Mutable:
    it has the pool and the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Capture. Raises PlanError where CUDA can't."""
        now = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            # Libraries make handles and workspaces in their first calls, which no graph may.
            run()
            try:
                # (Other threads of this process, NCCL's and loaders', go on meanwhile.)
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                run()
                graph.capture_end()
            except RuntimeError as error:
                raise PlanError(
                    f"CUDA can't capture a compiled block in a graph ({first_line(error)}); launch "
                    "with compiled `kernels`"
                ) from error
        now.wait_stream(self._stream)
        replay: Replay = graph.replay
        return replay


class Standing:
    """Memory that stays, of one class: tensors of several sizes lie in it. Mutable: made when it is
    first needed, and again where a size needs more.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], Tensor] = {}

    def like(self, use: str, at: int, tensor: Tensor) -> Tensor:
        """Return the tensor of this use and number, laid out as another one is."""
        needed = _extent(tensor) * tensor.element_size()
        held = self._of.get((use, at))
        if held is None or held.numel() < needed:
            held = torch.empty(needed, dtype=torch.uint8, device=tensor.device)
            self._of[use, at] = held
        return held[:needed].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _extent(tensor: Tensor) -> int:
    """How many numbers lie between a tensor's first and its last."""
    if not tensor.numel():
        return 0
    lies = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in lies)


class _Given(NamedTuple):
    """A result: in memory of an argument, or in memory of its own."""

    argument: int | None
    """The argument in whose memory it lies."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the argument's first element."""


class GraphedKernels:
    """One half of a class's blocks, called with the same tensors as its kernels. Mutable: a block's
    graph is captured when the block first runs.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        params: Sequence[int],
        num_blocks: int,
        capture: Capture,
        standing: Standing,
        half: str,
    ) -> None:
        """`params` are the arguments that are parameters, whose memory stays; `num_blocks` is how
        many blocks may run it. In `standing` lies what it takes and gives, under the name `half`.
        """
        self._standing, self._half = standing, half
        self._kernels, self._params, self._capture = kernels, tuple(params), capture
        self._num_blocks = num_blocks
        self._replays: dict[tuple[int, ...], Replay] = {}
        """By where the parameters lie."""
        self._others: tuple[int, ...] = ()
        self._taken: list[Tensor] = []
        self._given: list[Tensor] = []
        self._results: list[_Given] | None = None

    @torch.no_grad()
    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Run it; the list is emptied, as kernels do. Raises PlanError where CUDA can't capture it,
        and where parameters have moved.
        """
        arguments = dict(enumerate(tensors))
        tensors.clear()
        place = tuple([_address(arguments[at]) for at in self._params])
        if not self._taken:
            self._others = tuple(at for at in range(len(arguments)) if at not in self._params)
            self._taken = [
                self._standing.like(f"{self._half} takes", at, arguments[at]) for at in self._others
            ]
        if self._others:
            torch._foreach_copy_(self._taken, [arguments[at] for at in self._others])
        replay = self._replays.get(place)
        if replay is None:
            if len(self._replays) == self._num_blocks:
                raise PlanError(
                    "a parameter of a block in CUDA graphs has moved, and these read it where it "
                    "was; launch with compiled `kernels`"
                )
            params = [arguments[at] for at in self._params]
            replay = self._replays[place] = self._capture(lambda: self._run(params))
        assert self._results is not None
        viewed = {each.argument for each in self._results}
        # What nobody else holds is freed before the graph's results are made.
        arguments = {at: argument for at, argument in arguments.items() if at in viewed}
        replay()
        fresh = [_like(each) for each in self._given]
        if fresh:
            torch._foreach_copy_(fresh, self._given)
        rest = iter(fresh)
        return [
            next(rest) if each.argument is None else _within(arguments[each.argument], each)
            for each in self._results
        ]

    def _run(self, params: Sequence[Tensor]) -> None:
        """Run the kernels on memory that stays."""
        place = dict(zip(self._params, params, strict=True))
        place |= dict(zip(self._others, self._taken, strict=True))
        arguments = [place[at] for at in range(len(place))]
        made = self._kernels(arguments.copy())
        if self._results is None:
            lies = {x.untyped_storage()._cdata: at for at, x in enumerate(arguments)}
            self._results = [_given(x, arguments, lies) for x in made]
        results = zip(made, self._results, strict=True)
        own = [x for x, each in results if each.argument is None]
        self._given = self._given or [
            self._standing.like(f"{self._half} gives", at, x) for at, x in enumerate(own)
        ]
        # In the graph: what it allocates goes back to its pool, for the graphs of other blocks.
        if own:
            torch._foreach_copy_(self._given, own)


def _given(made: Tensor, arguments: Sequence[Tensor], lies: dict[int, int]) -> _Given:
    at = lies.get(made.untyped_storage()._cdata)
    offset = 0 if at is None else int(made.storage_offset() - arguments[at].storage_offset())
    return _Given(at, tuple(made.shape), tuple(made.stride()), offset)


def _within(argument: Tensor, result: _Given) -> Tensor:
    return argument.as_strided(
        result.size, result.stride, argument.storage_offset() + result.offset
    )


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
