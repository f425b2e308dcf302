"""What single ops of a program allocate: storages, what autograd saves of them, kernels' scratch.

The facts of an op stand in the record of its family (`planner.language.ops.record`). Here they are
applied to a program of one rank and counted by storage, because memory is held by storages and not
by tensors: a saved view keeps its whole base alive, and two saved views of a base cost once.
Whether `reshape` or `contiguous` copies depends on strides, so strides are followed too.

The tests hold the whole against `torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.language.graph import Op, Program
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import family_of
from planner.language.ops.strides import Strides, contiguous_strides

HELD_ANYWAY = frozenset({"param", "buffer", "constant", "input"})
"""Kinds whose storage lives through the step whether or not autograd refers to it."""


SavedInstead = Mapping[str, Mapping[str, tuple[str, ...]]]
"""By op: tensors that its backward makes again, each with those that are saved for that instead;
with none, a tensor is saved as a copy of its own."""

NOTHING_INSTEAD: SavedInstead = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory: the tensor that made it, its bytes, and that tensor's kind."""

    root: str
    num_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class StorageMap:
    """Storages and strides of every tensor of a bound program."""

    program: Program
    """The program; every size is a number."""
    device_type: str
    """Picks between kernels that save other things and lay their results out otherwise."""
    storage: Mapping[str, Storage]
    """The storage that each tensor lives in."""
    strides: Mapping[str, Strides]
    """Strides of each tensor, in elements."""
    views: frozenset[str]
    """Names of tensors whose op allocated nothing."""
    is_compiled: bool = False
    """Whether its ops run as kernels of compiled graphs."""

    def call(self, op: Op) -> KernelCall:
        """Return an op as the rules of its family read it."""
        return KernelCall(op, self.program.tensor, self.strides, self.device_type)


def map_storages(
    program: Program, *, device_type: str = "cuda", is_compiled: bool = False
) -> StorageMap:
    """Follow views through a bound program."""
    storage: dict[str, Storage] = {}
    strides: dict[str, Strides] = {}
    views: set[str] = set()
    for name in (*program.inputs, *program.params):
        meta = program.tensor[name]
        storage[name] = Storage(root=name, num_bytes=meta.bytes_at(1), kind=meta.kind)
        # A program is walked by itself, so what comes from outside is taken to lie in row-major
        # order.
        strides[name] = contiguous_strides(meta.shape_at(1))
    for op in program.ops:
        family = family_of(op.target)
        call = KernelCall(op, program.tensor, strides, device_type)
        for position, output in enumerate(op.outputs):
            # A view has its source's storage, and so the root of a whole chain of views.
            view = family.view(call, position) if family.view is not None and op.inputs else None
            if view is not None:
                storage[output], strides[output] = storage[view.source], view.strides
                views.add(output)
            else:
                meta = program.tensor[output]
                storage[output] = Storage(root=output, num_bytes=meta.bytes_at(1), kind=meta.kind)
                strides[output] = family.result(call, output)
    return StorageMap(
        program=program,
        device_type=device_type,
        storage=storage,
        strides=strides,
        views=frozenset(views),
        is_compiled=is_compiled,
    )


@dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """What autograd saves of a program for its backward, each storage once."""

    saved: Mapping[str, Saved]
    """What each op saves, by op."""
    by_op: Mapping[str, tuple[tuple[Storage, ...], int]]
    """The storages that an op is the first to save, and the bytes it saves beside tensors (masks,
    statistics); ops that save nothing new are left out."""
    inputs: tuple[str, ...]
    """Activation inputs that are saved: the neighbouring program may save their storage, too."""
    outputs: tuple[str, ...]
    """Outputs that are saved and no views of inputs."""
    storages: StorageMap
    """Where tensors lie."""

    @property
    def program(self) -> Program:
        """The program."""
        return self.storages.program

    @property
    def num_bytes(self) -> int:
        """Bytes saved in all, inputs and outputs included."""
        return sum(sum(s.num_bytes for s in first) + extra for first, extra in self.by_op.values())

    @property
    def roots(self) -> dict[str, int]:
        """Bytes of all storages that are saved."""
        return {s.root: s.num_bytes for first, _ in self.by_op.values() for s in first}

    @property
    def extra(self) -> dict[str, int]:
        """Bytes that each op saves beside tensors."""
        return {name: saved.extra_bytes for name, saved in self.saved.items()}


def saved_tensors(
    program: Program,
    *,
    device_type: str = "cuda",
    deferred: frozenset[str] = frozenset(),
    held_anyway: frozenset[str] = HELD_ANYWAY,
    instead: SavedInstead = NOTHING_INSTEAD,
    is_compiled: bool = False,
) -> SavedTensors:
    """Return what the backward of a bound program needs from its forward.

    deferred: products whose weight gradients are deferred. They save all inputs as they are given.
    held_anyway: kinds of tensors that are in memory whether saved or not.
    instead: what backwards make again.
    is_compiled: whether ops run as kernels of compiled graphs.
    """
    storages = map_storages(program, device_type=device_type, is_compiled=is_compiled)
    seen: set[str] = set()
    by_op = {}
    saved = {
        op.name: Saved(tensors=op.inputs)
        if op.name in deferred and _is_differentiable(op, program)
        else _saved_by(op, storages)
        for op in program.ops
    }
    if instead:
        saved = {
            name: _instead(mine, instead.get(name, {}), program) for name, mine in saved.items()
        }
    for name, mine in saved.items():
        first = []
        for tensor in mine.tensors:
            storage = storages.storage[tensor]
            # The first op that saves a storage runs backward last, so its backward frees the
            # storage.
            if storage.root not in seen and storage.kind not in held_anyway:
                seen.add(storage.root)
                first.append(storage)
        if first or mine.extra_bytes:
            by_op[name] = (tuple(first), mine.extra_bytes)
    # An output that is a view of an input lies in the neighbour's memory and counts there.
    roots = {name: storages.storage[name].root for name in program.outputs}
    return SavedTensors(
        saved=saved,
        by_op=by_op,
        inputs=tuple(n for n in program.inputs if n in seen),
        outputs=tuple(n for n, r in roots.items() if r in seen and r not in program.inputs),
        storages=storages,
    )


def _instead(saved: Saved, instead: Mapping[str, tuple[str, ...]], program: Program) -> Saved:
    # A tensor with nothing to make it again from (an empty tuple) is saved as a copy of its own.
    names = dict.fromkeys(of for name in saved.tensors for of in instead.get(name, (name,)))
    copies = tuple(name for name in saved.tensors if instead.get(name) == ())
    extra = sum(program.tensor[name].bytes_at(1) for name in copies)
    return Saved(tensors=tuple(names), extra_bytes=saved.extra_bytes + extra, copies=copies)


def _saved_by(op: Op, storages: StorageMap) -> Saved:
    """Return what an op saves for its backward; a view saves nothing."""
    if not _is_differentiable(op, storages.program) or op.outputs[0] in storages.views:
        return Saved()
    return family_of(op.target).saved(storages.call(op))


def _is_differentiable(op: Op, program: Program) -> bool:
    return any(program.tensor[name].requires_grad for name in op.outputs)


def scratch_bytes(op: Op, storages: StorageMap, *, forward: bool) -> int:
    """Return what a kernel holds only while it runs, beside its inputs, outputs and what it saves.

    It is below zero where a kernel frees some of those before all of them exist.
    """
    rule = family_of(op.target).scratch
    return 0 if rule is None else rule(storages.call(op), forward=forward)


def ahead_bytes(op: Op, needing: Sequence[str], storages: StorageMap) -> int:
    """Return the most that a backward holds before the gradients of the inputs `needing` them are
    all made, those made among it; 0 where it is never more than these.
    """
    rule = family_of(op.target).ahead
    return 0 if rule is None else rule(storages.call(op), needing)


def unreduced_bytes(op: Op, needing: Sequence[str], storages: StorageMap) -> int:
    """Return by how much a backward is higher than the gradients of the inputs that are `needing`
    them, before those are summed over broadcast dims, or cast to their inputs' dtypes.
    """
    rule = family_of(op.target).unreduced
    return 0 if rule is None else rule(storages.call(op), needing)
