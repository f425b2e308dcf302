"""What the kernel of an op does with memory: views, results, tensors saved for backward, scratch.

A record's memory rules are functions of a `KernelCall`. The common ones are here; a family's own
stand beside its record. PyTorch's `derivatives.yaml` says what an op saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

from planner.language.graph import Op, TensorMeta
from planner.language.ops.strides import Strides, contiguous_strides, is_dense
from planner.units import DTYPE_BYTES

LARGE_BYTES = 2**20
"""From this size on, a weight's gradient is added to the sum inside its product, unless ZeRO
takes gradients elsewhere (`planner.runtime.stage.weight_grads`)."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One op as a device runs it. Every size is a number; strides are those of the inputs."""

    op: Op
    tensor: Mapping[str, TensorMeta]
    strides: Mapping[str, Strides]
    device_type: str
    """`cpu` or `cuda`: their kernels save and lay out results differently."""

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by keyword, else `default`."""
        if index < len(self.op.args):
            return self.op.args[index]
        return next((value for key, value in self.op.kwargs if key == name), default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor's dims."""
        return self.tensor[name].shape_at(1)

    def numel(self, name: str) -> int:
        """Entries of a tensor."""
        return prod(self.shape(name))

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.tensor[name].bytes_at(1)

    def element_bytes(self, name: str) -> int:
        """Bytes of one entry of a tensor."""
        return DTYPE_BYTES[self.tensor[name].dtype]

    def needs_grad(self, name: str) -> bool:
        """Whether a tensor needs a gradient."""
        return self.tensor[name].requires_grad

    def statistic_bytes(self, name: str) -> int:
        """Bytes of one statistic of this tensor: GPU kernels keep them in fp32 or wider."""
        size = self.element_bytes(name)
        return size if self.device_type == "cpu" else max(4, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one op saves for its backward: tensors by name, and bytes of storages that no tensor
    of the program has (statistics, masks, private copies). `copies` names tensors whose private
    copies are among these bytes.
    """

    tensors: tuple[str, ...] = ()
    extra_bytes: int = 0
    copies: tuple[str, ...] = ()


class View(NamedTuple):
    """An output that allocates nothing: the input whose memory it has, and its own strides."""

    source: str
    strides: Strides


SavedRule = Callable[[KernelCall], Saved]
"""What an op saves where one of its outputs needs a gradient."""

ViewRule = Callable[[KernelCall, int], View | None]
"""Whether the output at a position is a view; None where it takes memory of its own."""

ResultRule = Callable[[KernelCall, str], Strides]
"""The strides of an output that takes memory of its own."""


class ScratchRule(Protocol):
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it saves; below
    zero where it frees some of those before all of them exist.
    """

    def __call__(self, call: KernelCall, *, forward: bool) -> int:
        """Return the bytes of the forward or of the backward kernel."""
        ...


# ------------------------------------------------------------------------- saved for backward


def saves_nothing(call: KernelCall) -> Saved:
    """The gradient follows from the arriving gradient and sizes."""
    return Saved()


def saves_differentiable_inputs(call: KernelCall) -> Saved:
    """All inputs that need a gradient: for an op of which nothing is known."""
    return Saved(tensors=tuple(n for n in call.op.inputs if call.needs_grad(n)))


def saves_inputs(*positions: int) -> SavedRule:
    """Return the rule of an op whose gradient reads some of its inputs."""

    def rule(call: KernelCall) -> Saved:
        names = call.op.inputs
        return Saved(tensors=tuple(names[i] for i in positions if i < len(names)))

    return rule


def saves_result(call: KernelCall) -> Saved:
    """The gradient is a function of the result: of exp(x) it is exp(x)."""
    return Saved(tensors=call.op.outputs[:1])


def saves_indices_of_result(call: KernelCall) -> Saved:
    """Where the chosen values came from: the op's second output."""
    return Saved(tensors=call.op.outputs[1:2])


def saves_other_inputs(call: KernelCall) -> Saved:
    """All inputs but the first: the indices by which entries were chosen."""
    return Saved(tensors=call.op.inputs[1:])


def saved_factors(call: KernelCall, left: str, right: str) -> tuple[str, ...]:
    """Return each factor of a product whose partner needs a gradient."""
    kept = (left,) if call.needs_grad(right) else ()
    return (*kept, right) if call.needs_grad(left) else kept


# ------------------------------------------------------------------------------ views, results


def same_memory(call: KernelCall, position: int) -> View | None:
    """The first input itself, or a part of it along one dim: the strides stay."""
    (source, *_) = call.op.inputs
    return View(source, call.strides[source])


def contiguous_result(call: KernelCall, output: str) -> Strides:
    """Newly allocated in row-major order."""
    return contiguous_strides(call.shape(output))


def in_order_of_inputs(call: KernelCall, output: str) -> Strides:
    """Element by element: the result has the order of dims of the first dense input of its shape
    (TensorIterator allocates so).
    """
    shape = call.shape(output)
    for source in call.op.inputs:
        if call.shape(source) == shape and is_dense(shape, call.strides[source]):
            return call.strides[source]
    return contiguous_strides(shape)


# ------------------------------------------------------------------------------------- scratch


def gradients_of_result_size(count: int) -> ScratchRule:
    """Return the rule of a backward that makes so many tensors of the result's size before it
    multiplies the gradient by the last of them: 3 x^2 by way of x^2 (derivatives.yaml).
    """

    def rule(call: KernelCall, *, forward: bool) -> int:
        return 0 if forward else count * call.num_bytes(call.op.outputs[0])

    return rule


def unreduced_gradients(call: KernelCall, needing: Sequence[str]) -> int:
    """Bytes by which the backward of a product with broadcasting or mixed dtypes is higher than
    its inputs' gradients: it makes them all like its output, then sums or casts each.
    """
    made = call.num_bytes(call.op.outputs[0])
    # All gradients like the output at first; each is then summed or cast into its own size, and
    # both exist for that moment.
    live = peak = made * len(needing)
    for name in needing:
        size = call.num_bytes(name)
        if size != made:
            peak = max(peak, live + size)
            live += size - made
    return peak - live
