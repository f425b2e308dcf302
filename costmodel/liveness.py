"""Memory a program needs beyond what it keeps: the highest point inside forward and backward.

Forward and backward are walked op by op. A forward value is freed after its last reader
unless autograd keeps it; a gradient is freed once the op that made its tensor has run
backward; what autograd kept is freed by the earliest op that kept it. Gradients follow
autograd's habits: views and sums pass their gradient on without a copy, and the second
gradient that reaches a tensor is added to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from costmodel.saved import SavedTensors
from costmodel.storage import base_name
from planner.graph import Op, Program
from planner.units import DTYPE_BYTES
from planner.weight_products import deferrable_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest bytes alive, above what was alive before, parameters' `.grad` not counted.

    `forward_bytes` starts from nothing of this program alive (its inputs not counted).
    `backward_bytes` starts with everything kept alive and counts that too, and the
    gradient of the outputs that is handed in. `input_gradient_bytes` is the same of a backward
    that puts weight gradients aside, and `pending_bytes` what then waits for them;
    `owning_bytes` of one that holds every parameter's gradient it has made to its end.
    """

    forward_bytes: int
    backward_bytes: int
    input_gradient_bytes: int
    pending_bytes: int
    owning_bytes: int


def find_peaks(program: Program, saved: SavedTensors) -> Peaks:
    """Return the peaks of one forward and one backward of a bound program."""
    later = {name: product[0].name for name, product in deferrable_products(program).items()}
    backward, _ = _backward_peak(program, saved, {})
    split, pending = _backward_peak(program, saved, later)
    owning, _ = _backward_peak(program, saved, {}, owns_gradients=True)
    return Peaks(
        forward_bytes=_forward_peak(program, saved),
        backward_bytes=backward,
        input_gradient_bytes=split,
        pending_bytes=pending,
        owning_bytes=owning,
    )


def _forward_peak(program: Program, saved: SavedTensors) -> int:
    storage = saved.storages.storage
    kept = {s.root for storages, _ in saved.by_op.values() for s in storages}
    last_use: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for name in (*op.inputs, *op.outputs):
            last_use[storage[name].root] = index
    for name in program.outputs:
        last_use[storage[name].root] = len(program.ops)
    dying: dict[int, list[str]] = {}
    for root, index in last_use.items():
        dying.setdefault(index, []).append(root)

    outside = {storage[name].root for name in (*program.inputs, *program.params)}
    live = peak = 0
    alive: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for name in op.outputs:
            owner = storage[name]
            if owner.root not in alive and owner.root not in outside:
                alive[owner.root] = owner.num_bytes
                live += owner.num_bytes
        live += saved.by_op.get(op.name, ((), 0))[1]
        peak = max(peak, live + _scratch_bytes(op, program, forward=True))
        for root in dying.get(index, ()):
            if root in alive and root not in kept:
                live -= alive.pop(root)
    return peak


def _backward_peak(
    program: Program,
    saved: SavedTensors,
    later: Mapping[str, str],
    *,
    owns_gradients: bool = False,
) -> tuple[int, int]:
    """Return the peak, and what is left at the end for the products named in `later` (with
    their activation): that activation and the gradient of the product.
    """
    tensor = program.tensor
    waiting = {saved.storages.storage[name].root for name in later.values()}
    grads = _Gradients()
    for name in program.outputs:
        if tensor[name].requires_grad:
            grads.allocate(name, _bytes(program, name))
    live_saved = saved.num_bytes
    outside = {s.root for n in program.inputs for s in (saved.storages.storage[n],)}
    peak = live_saved + grads.live
    for op in reversed(program.ops):
        arriving = [name for name in op.outputs if name in grads.of]
        if arriving:
            needing = [n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad]
            scratch = _scratch_bytes(op, program, forward=False)
            for name in needing:
                if tensor[name].kind == "param" and owns_gradients:
                    if name not in grads.of:
                        grads.allocate(name, _bytes(program, name))
                elif tensor[name].kind == "param":
                    scratch += 0 if op.name in later else _bytes(program, name)
                elif _passes_on(op, name, program, saved):
                    grads.share(name, arriving[0])
                else:
                    grads.allocate(name, _bytes(program, name))
            peak = max(peak, live_saved + grads.live + scratch)
            grads.settle(needing)
            for name in arriving if op.name not in later else ():
                grads.free(name)
        kept, extra = saved.by_op.get(op.name, ((), 0))
        held = outside | waiting
        live_saved -= extra + sum(s.num_bytes for s in kept if s.root not in held)
    roots = {s.root: s for kept, _ in saved.by_op.values() for s in kept}
    pending = sum(roots[root].num_bytes for root in waiting if root in roots)
    pending += grads.bytes_of(
        output for op in program.ops if op.name in later for output in op.outputs
    )
    return peak, pending


class _Gradients:
    """Gradient buffers by tensor; several tensors may share one. Mutable: it is a tally."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.live = 0
        self._bytes: list[int] = []
        self._users: list[int] = []
        self._second: dict[str, int] = {}

    def allocate(self, name: str, num_bytes: int) -> None:
        self._bytes.append(num_bytes)
        self._users.append(0)
        self.live += num_bytes
        self._attach(name, len(self._bytes) - 1)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of the buffers these tensors' gradients lie in, each once."""
        return sum(self._bytes[b] for b in {self.of[name] for name in names if name in self.of})

    def share(self, name: str, source: str) -> None:
        self._attach(name, self.of[source])

    def _attach(self, name: str, buffer: int) -> None:
        self._users[buffer] += 1
        if name in self.of:
            self._second[name] = buffer
        else:
            self.of[name] = buffer

    def settle(self, names: list[str]) -> None:
        """Add the second gradient of each tensor to its first, in one buffer."""
        for name in names:
            second = self._second.pop(name, None)
            if second is not None:
                # Added in place when one of the two is used by nobody else; else one more
                # buffer would be needed, and the sum takes the place of the shared one.
                first = self.of[name]
                keep, drop = (second, first) if self._users[first] > 1 else (first, second)
                self.of[name] = keep
                self._release(drop)

    def free(self, name: str) -> None:
        self._release(self.of.pop(name))

    def _release(self, buffer: int) -> None:
        self._users[buffer] -= 1
        if self._users[buffer] == 0:
            self.live -= self._bytes[buffer]


_SUMS = frozenset({"add", "sub", "clone", "contiguous"})


def _passes_on(op: Op, name: str, program: Program, saved: SavedTensors) -> bool:
    """Whether the gradient of `name` is the arriving gradient itself, or a view of it."""
    output = op.outputs[0]
    if len(op.outputs) > 1:
        return False
    source, result = program.tensor[name], program.tensor[output]
    same_size = prod(source.shape_at(1)) == prod(result.shape_at(1))
    if base_name(op.target) in _SUMS or op.target == "planner.redistribute":
        return same_size and source.dtype == result.dtype
    return output in saved.storages.views and same_size


def _scratch_bytes(op: Op, program: Program, *, forward: bool) -> int:
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it keeps."""
    name = base_name(op.target)
    if name == "cross_entropy_loss":
        # Backward: the gradient of the log-softmax, then the logits'.
        return 0 if forward else _bytes(program, op.inputs[0])
    if name == "vocab_cross_entropy":
        logits = program.tensor[op.inputs[0]]
        wide = prod(logits.shape_at(1)) * max(4, DTYPE_BYTES[logits.dtype])
        # Forward: shifted logits and their exponentials beside the probabilities; backward:
        # the gradient before and after the targets' share is added.
        return 2 * wide if forward else wide
    return 0


def _bytes(program: Program, name: str) -> int:
    meta = program.tensor[name]
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]
