"""Activation recomputation of a block: keep little, and run it again in the backward.

A call of a block runs twice. In the first run autograd saves no tensor, only a number for
each that it would have saved; when the backward needs one, the second run makes them
all. Ops that are *kept* (`KeptOp`, none under "full") run in the first run only: what
autograd saves of their own making is saved as ever, what they were given is made again,
and the second run reads their results where it needs them.

PyTorch's selective checkpointing decides below autograd, kernel by kernel, through a mode
that every operator passes; here the ops of the program decide, only kept ones pay for it,
and neither the kernels inside one op nor a result that nobody reads is held.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from planner.runtime.stage.host_activations import ActivationsOnHost, Saved
from planner.runtime.stage.randomness import read_generators, write_generators

Outputs = tuple[Any, ...]


class Keeper:
    """Tells kept ops which call of a block they run in; None where all runs once. Mutable."""

    def __init__(self) -> None:
        self.current: _Call | None = None

    @contextmanager
    def serving(self, call: _Call) -> Iterator[None]:
        """Let the kept ops inside leave their results to a call, or take them from it."""
        self.current = call
        try:
            yield
        finally:
            self.current = None


class KeptOp(nn.Module):
    """An op whose result is kept where its block is recomputed.

    `made_again` says which leaves of its arguments come from ops that run again, and
    `is_read[i]` whether such an op reads output i.
    """

    def __init__(
        self,
        keeper: Keeper,
        function: Callable[..., Any],
        *,
        made_again: frozenset[int],
        is_read: tuple[bool, ...],
        is_random: bool,
    ) -> None:
        super().__init__()
        self._keeper, self._function = keeper, function
        self.made_again, self.is_read, self.is_random = made_again, is_read, is_random

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op, or return its kept result in a second run."""
        call = self._keeper.current
        if call is None:
            return self._function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        # Only arguments that are made again: what autograd saves of them can be dropped now, and
        # found in the second run.
        given = {position: leaves[position] for position in self.made_again}
        if call.is_second:
            return call.recall(self, given)
        return call.keep(self, given, lambda: self._function(*args, **kwargs))


class Recomputed:
    """A block's run under recomputation: "full" without a keeper, else "selective".

    It runs on `device`. What is kept goes to the host where `away` packs a forward. The second
    run draws the random numbers of the first if it `draws` any; `again` tells the block of it,
    so that it leaves its buffers alone.
    """

    def __init__(
        self,
        run: Callable[..., Outputs],
        *,
        device: torch.device,
        keeper: Keeper | None = None,
        draws: bool = True,
        away: ActivationsOnHost | None = None,
    ) -> None:
        self.run, self.keeper, self.draws, self.away = run, keeper, draws, away
        self.device = device
        self.again = False
        self._latest: weakref.ref[_Call] | None = None

    def __call__(self, *inputs: Any) -> Outputs:
        """Run the block on its inputs: tensors, or numbers and tuples of tensors that live on."""
        if not torch.is_grad_enabled():
            return self.run(*inputs)
        call = _Call(self, inputs)
        self._latest = weakref.ref(call)  # The graph that the run makes is what keeps it.
        return call.first_run(*inputs)

    def take_latest(self) -> Callable[[], None] | None:
        """Return what makes the last call's tensors again ahead of its backward, once."""
        call = None if self._latest is None else self._latest()
        self._latest = None
        return None if call is None else call.make_again


@dataclass(frozen=True, slots=True)
class _View:
    """Where in one of a kept op's arguments (by leaf) lies a tensor that autograd saved."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Put:
    """A tensor kept for the second run: itself, or what is packed of it."""

    kept: Tensor | Saved
    requires_grad: bool


@dataclass(slots=True)
class _Kept:
    """What a kept op left: its results (None where nobody reads it), the views of its
    arguments that it saved, the tensors saved before its end, and the random state then.
    """

    result: list[Any]
    is_list: bool
    views: list[_View]
    num_saved: int
    generators: list[Tensor] | None


class _AllMade(Exception):
    """Ends a second run early; not an error."""


class _Call:
    """One call of a block, from its first run to its backward. Mutable.

    Tensors for autograd are numbered in the order the first run would have saved them.
    """

    def __init__(self, owner: Recomputed, inputs: tuple[Any, ...]) -> None:
        self.is_second = False
        self._owner = owner
        self._parcel = None if owner.away is None else owner.away.current
        self._inputs = tuple(self._put(x) if isinstance(x, Tensor) else x for x in inputs)
        self._device = owner.device
        self._num_saved = 0
        self._made: dict[int, Tensor] = {}
        self._kept: dict[KeptOp, _Kept] = {}
        self._views: list[_View] = []
        self._given: dict[int, Tensor] | None = None
        # The state before the first run, from which the second draws the same numbers.
        self._generators = read_generators(self._device) if owner.draws else None

    def first_run(self, *inputs: Any) -> Outputs:
        with saved_tensors_hooks(self._pack, self._unpack), self._serving():
            outputs = self._owner.run(*inputs)
        for kept in self._kept.values():
            # The second run ends before anything reads the results of the last ops.
            is_read = kept.num_saved < self._num_saved
            kept.result = [None if x is None or not is_read else self._put(x) for x in kept.result]
        return outputs

    def keep(self, op: KeptOp, given: dict[int, Tensor], function: Callable[[], Any]) -> Any:
        """Run a kept op for the first time; `given` are its arguments that are made again."""
        # Seen by `_pack` while the op runs: what autograd saves then is of a kept op.
        self._given, self._views = given, []
        try:
            result = function()
        finally:
            self._given = None
        self._kept[op] = _Kept(
            result=_readable(result, op.is_read),
            is_list=not isinstance(result, Tensor),
            views=self._views,
            num_saved=self._num_saved,
            generators=read_generators(self._device) if op.is_random else None,
        )
        return result

    def recall(self, op: KeptOp, given: dict[int, Tensor]) -> Any:
        """Return a kept op's results in the second run."""
        kept = self._kept[op]
        # In the order of the first run, since both runs number saved tensors by their order.
        for view in kept.views:
            self._collect(given[view.leaf].as_strided(view.size, view.stride, view.offset))
        # The op drew numbers in the first run alone; ops behind it draw on from where it left off.
        if kept.generators is not None:
            write_generators(self._device, kept.generators)
        result = [None if x is None else self._take(x) for x in kept.result]
        return result if kept.is_list else result[0]

    def _put(self, tensor: Tensor) -> _Put:
        """Keep a tensor without its past, which a second run would otherwise keep alive."""
        value = tensor.detach()
        kept = value if self._parcel is None else self._parcel.pack(value)
        return _Put(kept, tensor.requires_grad)

    def _take(self, put: _Put) -> Tensor:
        kept = put.kept
        if self._parcel is not None:
            kept = self._parcel.unpack(kept)
        assert isinstance(kept, Tensor)
        return kept.detach().requires_grad_(put.requires_grad)

    def _pack(self, tensor: Tensor) -> Tensor | Saved | int:
        # A kept op does not run again, so of its own making the tensor itself is saved. A view of
        # an argument is numbered as all else is.
        if self._given is not None:
            view = _view_of(tensor, self._given)
            if view is None:  # The op's own, a weight, or held by who made it.
                return tensor if self._parcel is None else self._parcel.pack(tensor)
            self._views.append(view)
        # Only a number is kept: this is the memory that recomputation frees.
        self._num_saved += 1
        return self._num_saved - 1

    def _unpack(self, saved: Tensor | Saved | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not isinstance(saved, int):
            assert self._parcel is not None
            return self._parcel.unpack(saved)
        # The first tensor that the backward needs brings the second run, which makes all of them.
        if saved not in self._made:
            self._second_run()
        # Autograd alone holds it now, so memory shrinks node by node as without recomputation.
        return self._made.pop(saved)

    def make_again(self) -> None:
        """Make the tensors that the backward will read, if there are any."""
        if self._num_saved and not self._made:
            self._second_run()

    def _second_run(self) -> None:
        self._made.clear()
        # With gradients, since ops save tensors only then. The graph itself is dropped: its hook
        # packs None for each tensor, so it holds no memory.
        self.is_second = self._owner.again = True
        try:
            with (
                _restored(self._device, self._generators),
                torch.enable_grad(),
                saved_tensors_hooks(self._collect, _never),
                self._serving(),
                contextlib.suppress(_AllMade),
            ):
                self._owner.run(
                    *(self._take(x) if isinstance(x, _Put) else x for x in self._inputs)
                )
        finally:
            self.is_second = self._owner.again = False

    def _collect(self, tensor: Tensor) -> None:
        self._made[len(self._made)] = tensor.detach()
        if len(self._made) == self._num_saved:
            raise _AllMade

    def _serving(self) -> contextlib.AbstractContextManager[None]:
        keeper = self._owner.keeper
        return contextlib.nullcontext() if keeper is None else keeper.serving(self)


def _view_of(tensor: Tensor, given: dict[int, Tensor]) -> _View | None:
    # (Tensors are views of one memory if their storages have one address.)
    storage = tensor.untyped_storage()._cdata
    for leaf, arg in given.items():
        if arg.untyped_storage()._cdata == storage and arg.dtype == tensor.dtype:
            return _View(leaf, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())  # type: ignore[arg-type]
    return None


def _readable(result: Any, is_read: tuple[bool, ...]) -> list[Tensor | None]:
    results = [result] if isinstance(result, Tensor) else result
    return [
        x.detach().requires_grad_(x.requires_grad) if read else None
        for x, read in zip(results, is_read, strict=True)
    ]


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")


@contextmanager
def _restored(device: torch.device, generators: list[Tensor] | None) -> Iterator[None]:
    """Draw random numbers from these states inside, and go on from the present ones after."""
    if generators is None:
        yield
        return
    present = read_generators(device)
    write_generators(device, generators)
    try:
        yield
    finally:
        write_generators(device, present)
