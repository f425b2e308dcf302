"""One rank of a plan on fake tensors: what memory it would hold, byte by byte, job by job.

The real engine runs, with every tensor a shape without values and every message sent to
nobody (PyTorch's fake process group), so a plan for a thousand GPUs can be looked at on a
laptop, rank by rank. Bytes are those of live storages as the CPU kernels allocate them:
what an allocator rounds up, and the framework's own context, are not in them. What the plan
puts on the host is counted apart, though here both are the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from planner.capture.modes.ledger import Ledger, MemorySample
from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.runtime.proofs.adam_of_rows import AdamOfRows
from planner.runtime.proofs.counted_host import CountedHost, count_shards_as_host

if TYPE_CHECKING:
    from planner.runtime.initial.values import FirstValues
    from planner.runtime.process.groups.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The byte timeline of one rank over one step, after a step that set up all state."""

    rank: int
    """The global rank."""
    pp_rank: int
    """Its pipeline rank."""
    batch_bytes: int
    """The batch, which the caller holds between steps too."""
    rest_bytes: int
    """Alive on the device between two steps: weights, gradients, optimizer state, the batch."""
    host_rest_bytes: int
    """Alive between two steps where the plan puts it on the host."""
    start_bytes: int
    """The most bytes alive at once on the device while `planner.apply` runs, the batch left out."""
    start_host_bytes: int
    """Host memory beside that while the rank makes its first values: a piece of a tensor, or a
    tensor that can't be made in pieces with what it is made from. 0 where it was not recorded."""
    samples: tuple[MemorySample, ...]
    """Jobs and other parts of the step, in order."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once in the step or at the start."""
        in_step = max((sample.peak_bytes for sample in self.samples), default=self.rest_bytes)
        return max(in_step, self.start_bytes)

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes on the host at once in the step."""
        return max((sample.host_bytes for sample in self.samples), default=self.host_rest_bytes)


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
    from planner.runtime.initial.record import record
    from planner.runtime.initial.values import NoValues, RecordedValues
    from planner.runtime.process.groups.mesh import build_mesh

    if not 0 <= rank < plan.world_size:
        raise PlanError(
            f"rank {rank} is not in the plan, which has {plan.world_size} ranks; "
            f"use 0 to {plan.world_size - 1}"
        )
    try:
        recording = record(build)
    except Exception:  # as `planner.apply` then does, with a warning
        model, start_host_bytes = build_without_values(build), 0
    else:
        model = recording.module
        start_host_bytes = RecordedValues.peak_bytes(recording)
    with _fake_ranks(rank, plan.world_size), _without_values():
        mesh = build_mesh(plan, torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _track(
                plan,
                graph,
                lambda: _empty_copy(model),
                mesh,
                lambda: _fake_batch(plan),
                is_dry=True,
                on_gloo=on_gloo,
                # Pieces of values on their way to the device lie in host memory.
                values=NoValues(),
                start_host_bytes=start_host_bytes,
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
    values: FirstValues | None = None,
    start_host_bytes: int = 0,
) -> DryRun:
    from planner.runtime.proofs.counted_host import count_tables_as_host
    from planner.runtime.stage.compiled.kernels import op_by_op
    from planner.runtime.step.engine import Engine

    if is_dry and plan.kernels == "graphs":  # which a device captures
        plan = plan.model_copy(update={"kernels": "compiled"})
    ledger = Ledger(is_dry=is_dry, copies_to_reduce=is_dry and on_gloo)
    model = build()
    with ledger.watching():
        batch = make_batch()
        batch_bytes = ledger.live_bytes
        host = CountedHost(mesh.device, ledger)
        engine = Engine(
            plan,
            graph,
            model,
            mesh,
            # Fused: the plain loop reads step counters, which have no value in a dry run.
            optimizer=lambda p: AdamOfRows(p, holding=host.holding, fused=True),
            host=host,
            # Its bytes are those of the graphs' own ops; a compiler takes no shapes without values.
            compiler=op_by_op if is_dry else None,
            values=values,
        )
        start_bytes = ledger.peak_bytes - batch_bytes
        if plan.optimizer_on_host:
            count_shards_as_host(engine.state, ledger)
        if not on_gloo:
            engine._executor._post._sending = _Gone()
        del model  # as `apply` does: only the pieces stay
        # (The first step makes the optimizer's state, which is a part of what rests.)
        engine.step(batch)
        count_tables_as_host(engine.state, ledger)
        rest_bytes, host_rest_bytes = ledger.live_bytes, ledger.host_bytes
        engine._spans.recorder = ledger  # type: ignore[assignment]
        ledger.clear()
        engine.step(batch)
    return DryRun(
        rank=dist.get_rank(),
        pp_rank=mesh.rank("pp"),
        batch_bytes=batch_bytes,
        rest_bytes=rest_bytes,
        host_rest_bytes=host_rest_bytes,
        start_bytes=start_bytes,
        start_host_bytes=start_host_bytes,
        samples=tuple(ledger.samples),
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


def _all_say_the_same(found: list[Any], own: Any, group: Any = None) -> None:
    found[:] = [own] * len(found)


@contextmanager
def _without_values() -> Iterator[None]:
    """Let the runtime make meshes and FSDP2 join them for real, as ranks can't be looked up
    without values; let what ranks tell each other be what each would have said itself; and let
    FSDP2 make only the shards that it reads.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.utils._python_dispatch import _disable_current_modes

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return made

    kept = {name: getattr(DeviceMesh, name) for name in ("_concatenate", "from_group")}
    for name, function in kept.items():
        setattr(DeviceMesh, name, staticmethod(real(function)))
    broadcast, gather = dist.broadcast_object_list, dist.all_gather_object
    dist.broadcast_object_list = lambda *args, **kwargs: None
    dist.all_gather_object = _all_say_the_same  # type: ignore[assignment]
    chunks = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = LazyChunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = chunks
        dist.broadcast_object_list, dist.all_gather_object = broadcast, gather
        for name, function in kept.items():
            setattr(DeviceMesh, name, staticmethod(function))


@dataclass(frozen=True)
class LazyChunks:
    """The chunks of a tensor that FSDP2 makes of each parameter, each made when it is read.

    FSDP2 makes a list of as many views as ranks share a parameter, twice, and reads two of them.
    A fake view takes some 0.2 ms, so for 1,137 parameters on 512 ranks the list took minutes.
    """

    tensor: torch.Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one chunk: all have the size of the first but the last, which may have less.

        Chunks beyond the end of a tensor have no element and one dim.
        """
        size = self.tensor.size(self.dim)
        per_chunk = -(-size // self.num_chunks)
        start = index * per_chunk
        if start >= size > 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(per_chunk, size - start))


def _empty_copy(model: nn.Module) -> nn.Module:
    """The model with a fake tensor on the meta device for each of its tensors, as `apply` has it.

    It is not built under the fake mode: a module cannot cast its fake parameters (``.to(dtype)``
    swaps them, which a tensor with weak references refuses).
    """
    from planner.capture.export import copy_with_tensors

    return copy_with_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def _fake_batch(plan: Plan) -> Any:
    """A global batch of the shapes the plan was made with."""
    from planner.capture import batch_from_spec
    from planner.language.graph.batch import flatten_batch, unflatten_batch

    meta = batch_from_spec(plan.model.inputs, plan.model.batch_tree, plan.global_units)
    leaves, tree = flatten_batch(meta)
    return unflatten_batch(
        tree, {path: torch.empty(t.shape, dtype=t.dtype) for path, t in leaves.items()}
    )


class _Gone(deque[Any]):
    """A queue of messages under way that are never kept."""

    def append(self, item: Any) -> None:
        """Drop the message."""
