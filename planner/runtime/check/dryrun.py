"""One rank of a plan on fake tensors: what memory it would hold, byte by byte, job by job.

The real engine runs, with every tensor a shape without values and every message sent to
nobody (PyTorch's fake process group), so a plan for a thousand GPUs can be looked at on a
laptop, rank by rank. Bytes are those of live storages as the CPU kernels allocate them:
what an allocator rounds up, and the framework's own context, are not in them. What the plan
puts on the host is counted apart, though here both are the same memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import PlanError
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.runtime.state.host import Host, Pairs, Ticket

if TYPE_CHECKING:
    from planner.runtime.start.mesh import Mesh
    from planner.runtime.step.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A job, or another part of a step, with the live bytes at its end and at its height.

    `host_bytes` is the height of those on the host.
    """

    kind: str
    name: str
    end_bytes: int
    peak_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The byte timeline of one rank over one step, after a step that set up all state.

    `rest_bytes` are alive between two steps: weights, gradients, optimizer state and, as
    the caller holds it, the batch (`batch_bytes`). `host_rest_bytes` are those of them that
    the plan puts on the host; the others are a device's alone.
    """

    rank: int
    pp_rank: int
    batch_bytes: int
    rest_bytes: int
    host_rest_bytes: int
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once in the step."""
        return max((moment.peak_bytes for moment in self.moments), default=self.rest_bytes)

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes on the host at once in the step."""
        return max((moment.host_bytes for moment in self.moments), default=self.host_rest_bytes)


def dry_run(
    plan: Plan,
    graph: ModelGraph,
    build: Callable[[], nn.Module],
    *,
    rank: int = 0,
    on_gloo: bool = False,
) -> DryRun:
    """Run two steps of one rank on fake tensors and return the second's byte timeline.

    `graph` is the capture of what `build` returns. Messages have left at once; with `on_gloo`
    they are kept (`p2p`), and FSDP2's reduce-scatter sums in a copy of its message
    (torch 2.13, ProcessGroupGloo.cpp). Raises PlanError when the plan has no such rank, or when
    this process is already part of a process group.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from planner.capture import build_without_values
    from planner.runtime.start.mesh import build_mesh

    if not 0 <= rank < plan.world_size:
        raise PlanError(
            f"rank {rank} is not in the plan, which has {plan.world_size} ranks; "
            f"use 0 to {plan.world_size - 1}"
        )
    model = build_without_values(build)
    with _fake_ranks(rank, plan.world_size), _without_values():
        mesh = build_mesh(plan, torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _track(
                plan,
                graph,
                lambda: _fake_copy(model),
                mesh,
                lambda: _fake_batch(plan),
                is_dry=True,
                on_gloo=on_gloo,
            )


def track_run(
    plan: Plan,
    graph: ModelGraph,
    build: Callable[[], nn.Module],
    mesh: Mesh,
    batch: Callable[[int], Any],
) -> DryRun:
    """Run two steps for real, with all ranks, and return this one's timeline of live tensors.

    Slower than a step is, as every op is watched. Every rank calls this; `batch` makes one of a
    given size.
    """
    return _track(
        plan, graph, build, mesh, lambda: batch(plan.global_batch), is_dry=False, on_gloo=True
    )


def _track(
    plan: Plan,
    graph: ModelGraph,
    build: Callable[[], nn.Module],
    mesh: Mesh,
    make_batch: Callable[[], Any],
    *,
    is_dry: bool,
    on_gloo: bool,
) -> DryRun:
    from planner.runtime.step.engine import Engine

    ledger = _Ledger(is_dry=is_dry, copies_to_reduce=is_dry and on_gloo)
    model = build()
    with ledger.watching():
        batch = make_batch()
        batch_bytes = ledger.live_bytes
        engine = Engine(
            plan,
            graph,
            model,
            mesh,
            # Fused: the plain loop reads step counters, which have no value in a dry run.
            optimizer=lambda p: torch.optim.AdamW(p, fused=True),
            host=_CountedHost(mesh.device, ledger),
        )
        if plan.optimizer_on_host:
            _count_shards_as_host(engine, ledger)
        if not on_gloo:
            engine._executor._post._sending = _Gone()
        del model  # as `apply` does: only the pieces stay
        engine.step(batch)
        rest_bytes, host_rest_bytes = ledger.live_bytes, ledger.host_bytes
        # Both call the same recorder, which is all that a timeline needs of them.
        engine._recorder = engine._executor._recorder = ledger  # type: ignore[assignment]
        ledger.clear()
        engine.step(batch)
    return DryRun(
        rank=dist.get_rank(),
        pp_rank=mesh.rank("pp"),
        batch_bytes=batch_bytes,
        rest_bytes=rest_bytes,
        host_rest_bytes=host_rest_bytes,
        moments=tuple(ledger.moments),
    )


@contextmanager
def _fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise PlanError(
            "this process is in a process group; dry-run a plan in a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_values() -> Iterator[None]:
    """Let the runtime make meshes and FSDP2 join them for real, as ranks can't be looked up
    without values; and let what rank 0 tells the others be what each would have said itself.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return made

    kept = {name: getattr(DeviceMesh, name) for name in ("_concatenate", "from_group")}
    for name, function in kept.items():
        setattr(DeviceMesh, name, staticmethod(real(function)))
    broadcast = dist.broadcast_object_list
    dist.broadcast_object_list = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.broadcast_object_list = broadcast
        for name, function in kept.items():
            setattr(DeviceMesh, name, staticmethod(function))


def _fake_copy(model: nn.Module) -> nn.Module:
    """The model with a fake tensor on the CPU for each of its tensors.

    It is not built under the fake mode: a module cannot cast its fake parameters (``.to(dtype)``
    swaps them, which a tensor with weak references refuses).
    """
    from planner.capture.export import copy_with_tensors

    return copy_with_tensors(model, lambda tensor: torch.empty_like(tensor, device="cpu"))


def _fake_batch(plan: Plan) -> Any:
    """A global batch of the shapes the plan was made with."""
    from planner.capture import batch_from_spec
    from planner.graph.batch import flatten_batch, unflatten_batch

    meta = batch_from_spec(plan.model.inputs, plan.model.batch_tree, plan.global_batch)
    leaves, tree = flatten_batch(meta)
    return unflatten_batch(
        tree, {path: torch.empty(t.shape, dtype=t.dtype) for path, t in leaves.items()}
    )


class _Gone(deque[Any]):
    """A queue of messages under way that are never kept."""

    def append(self, item: Any) -> None:
        """Drop the message."""


class _Ledger(TorchDispatchMode):
    """Counts bytes of live storages as ops make them, and plays the engine's recorder.

    `live_bytes` are the device's, `host_bytes` the host's. Mutable: it is a running tally. A
    storage is found when an op returns a tensor in it, changes when FSDP2 resizes it, and
    leaves when the last tensor in it dies. `is_dry`: tensors have no values. `copies_to_reduce`:
    a reduce-scatter is counted with the copy of its message that it would make.
    """

    def __init__(self, *, is_dry: bool, copies_to_reduce: bool) -> None:
        super().__init__()
        self._is_dry, self._copies_to_reduce = is_dry, copies_to_reduce
        self.live_bytes = self.host_bytes = 0
        self.moments: list[Moment] = []
        self._peak_bytes = self._host_peak_bytes = 0
        self._is_host = False
        self._on_host: set[int] = set()
        self._bytes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs and _is_accumulation(*args):
            func = torch.ops.aten.add_.Tensor
        if func is torch.ops.aten.index_put.default and _is_backward_of_index():
            func = torch.ops.aten.index_put_.default
        if self._is_dry and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as it is for real: on fake tensors the op would return a copy
        made = func(*args, **(kwargs or {}))
        if self._copies_to_reduce and func is torch.ops.c10d._reduce_scatter_base_.default:
            message = args[1].untyped_storage().nbytes()
            self._peak_bytes = max(self._peak_bytes, self.live_bytes + message)
        for leaf in torch.utils._pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                # A DTensor is a shell of the whole's size around its local tensor.
                held = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                self._see(held.untyped_storage())
        return made

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside, storages resized in place included: resizing is not an op."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._bytes:
                self._count(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def span(self, kind: str, name: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Note what happens inside as one moment, with what happened since the one before; waits
        inside a job are part of it.
        """
        if kind == "WAIT":
            yield
            return
        yield
        self.moments.append(
            Moment(
                kind=kind,
                name=name,
                end_bytes=self.live_bytes,
                peak_bytes=self._peak_bytes,
                host_bytes=self._host_peak_bytes,
            )
        )
        self._peak_bytes, self._host_peak_bytes = self.live_bytes, self.host_bytes

    @contextmanager
    def counting_as_host(self) -> Iterator[None]:
        """Count storages made inside as the host's."""
        before, self._is_host = self._is_host, True
        try:
            yield
        finally:
            self._is_host = before

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor's storage as the host's from now on."""
        key = tensor.untyped_storage()._cdata
        num_bytes = self._bytes.get(key, 0)
        if num_bytes and key not in self._on_host:
            self._count(key, 0)
            self._on_host.add(key)
            self._count(key, num_bytes)

    def end_step(self) -> None:
        """Nothing: moments are read when both steps are over."""

    def clear(self) -> None:
        """Begin anew, with what is alive."""
        self.moments.clear()
        self._peak_bytes, self._host_peak_bytes = self.live_bytes, self.host_bytes

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return

        def gone(_: Any) -> None:
            self._count(key, 0)
            del self._bytes[key], self._alive[key]
            self._on_host.discard(key)

        self._bytes[key] = 0
        if self._is_host:
            self._on_host.add(key)
        self._alive[key] = weakref.ref(storage, gone)
        self._count(key, storage.nbytes())

    def _count(self, key: int, num_bytes: int) -> None:
        more = num_bytes - self._bytes[key]
        self._bytes[key] = num_bytes
        if key in self._on_host:
            self.host_bytes += more
            self._host_peak_bytes = max(self._host_peak_bytes, self.host_bytes)
        else:
            self.live_bytes += more
            self._peak_bytes = max(self._peak_bytes, self.live_bytes)


class _Done:
    """Copies of nothing, which are over at once."""

    def wait(self) -> None:
        """Go on."""

    def hold_device(self) -> None:
        """Go on."""


class _CountedHost(Host):
    """The host's side of a rank whose memory a ledger counts."""

    def __init__(self, device: torch.device, ledger: _Ledger) -> None:
        super().__init__(device)
        self._ledger = ledger

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, is_copied: bool = False) -> Tensor:
        with self.holding():
            return super().empty(shape, dtype, is_copied=is_copied)

    def holding(self) -> AbstractContextManager[None]:
        return self._ledger.counting_as_host()

    def _begin(self, pairs: Pairs, direction: str, name: str) -> Ticket:
        return _Done()


def _count_shards_as_host(engine: Engine, ledger: _Ledger) -> None:
    """Count as the host's what FSDP2 would copy there: it leaves out copies from CPU to CPU."""
    for copies in engine._trained.by_name().values():
        for param in copies:
            if isinstance(param, DTensor):
                ledger.move_to_host(param._local_tensor)
                param.register_post_accumulate_grad_hook(
                    lambda shard: ledger.move_to_host(shard.grad._local_tensor)
                )


_ONLY_USERS = 4, 2
"""References to a gradient, and to its storage, that nobody but autograd's engine and this
mode hold: the engine's own, those of the call, and Python's."""


def _is_backward_of_index() -> bool:
    """Whether an index's backward runs: it puts into zeros of its own, in place unless a mode
    watches (`index_backward` in PyTorch's FunctionsManual.cpp).
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "IndexBackward0"


def _is_accumulation(total: Any, grad: Any) -> bool:
    """Whether autograd's engine adds a second gradient to one that nobody else has.

    It does so in place, except where a mode watches: then it makes a third.
    """
    return (
        torch._C._current_autograd_node() is not None
        and not torch.is_grad_enabled()
        and isinstance(total, Tensor)
        and isinstance(grad, Tensor)
        and total.shape == grad.shape
        and total.dtype == grad.dtype
        and torch.ops.aten.is_non_overlapping_and_dense(total)
        and total._use_count() == _ONLY_USERS[0]  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(total.untyped_storage()._cdata) == _ONLY_USERS[1]
    )
