"""Modules of the user's that are called as they are (`planner.runtime.stage.calls.opaque_modules`).

Every rank of tp and cp computes the whole. The backward runs the forward again, so that only the
op's inputs are saved. What both take was counted when the module was tried on random values
(`planner.capture.opaque`).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.layout.placement import OpSharding, Replicate, Shard
from planner.language.ops.call import Call, Work
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import OpFamily, register
from planner.language.ops.samples.step import Across


def samples_apart(call: Call) -> Iterator[OpSharding]:
    """The tensors of which a trial found that their first dim runs over samples."""
    holds_samples = tuple(bool(holds) for holds in call.op.args[2])  # type: ignore[union-attr]
    if not any(holds_samples):
        return
    rows, whole = Shard(0), Replicate()
    places = [rows if holds else whole for holds in holds_samples]
    own = len(call.op.inputs) - len(places)
    yield OpSharding(inputs=(*places, *(whole,) * own), outputs=(rows,) * len(call.op.outputs))


def _counts(call: Call | KernelCall, *, forward: bool) -> tuple[int, ...]:
    """Flop, bytes read, bytes written, kernels, scratch bytes."""
    return call.op.args[3][0 if forward else 1]  # type: ignore[index,return-value]


def _flop(call: Call) -> float:
    return float(_counts(call, forward=True)[0])


def _work(call: Call, forward: Work) -> Work:
    flop, read, written, *_ = _counts(call, forward=False)
    return Work(flop=float(flop), read_bytes=float(read), write_bytes=float(written))


def _reads(call: Call) -> float:
    """All bytes that its kernels move, but for those of its results."""
    _, read, written, *_ = _counts(call, forward=True)
    made = sum(call.num_bytes(name) for name in call.op.outputs)
    return float(max(0, read + written - made))


def _kernels(call: Call) -> tuple[int, int]:
    return _counts(call, forward=True)[3], _counts(call, forward=False)[3]


def _saved(call: KernelCall) -> Saved:
    return Saved(tensors=call.op.inputs)


def _scratch(call: KernelCall, *, forward: bool) -> int:
    return _counts(call, forward=forward)[4]


register(
    OpFamily(
        name="module called as it is",
        targets=(OPAQUE_MODULE,),
        arithmetic="matmul",
        flop=_flop,
        reads=_reads,
        backward=_work,
        kernels=_kernels,
        saved=_saved,
        scratch=_scratch,
        recomputed=False,
        eager="it calls a module as it is",
        across=Across(rule=samples_apart, sizes_only=True),
    )
)
