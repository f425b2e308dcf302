"""Gradient buffers during a backward, as autograd's engine shares, adds up and frees them.

A view's backward and a sum's hand their gradient on without a copy, so several tensors may have
one buffer. The second gradient of a tensor is added to the first in place where no other tensor
has that buffer and it has no gaps (`can_accumulate_inplace` in PyTorch's input_buffer.cpp); else
their sum takes a buffer more.
"""

from __future__ import annotations

from planner.language.graph import Op, Program
from planner.language.ops.record import family_of
from planner.language.ops.strides import Strides, reshaped_strides


class Gradients:
    """Gradient buffers by tensor. Mutable: `live` is what they take together now.

    `gaps` names tensors whose gradients are views with gaps.
    """

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.live = 0
        # By number of a buffer: its bytes, and how many tensors have their gradients in it.
        self._bytes: list[int] = []
        self._users: list[int] = []
        # Further gradients of a tensor until the engine has added them to the first.
        self._further: dict[str, list[int]] = {}
        self.gaps: set[str] = set()

    def allocate(self, name: str, num_bytes: int) -> None:
        """Give a tensor a gradient in a buffer of its own."""
        self._bytes.append(num_bytes)
        self._users.append(0)
        self.live += num_bytes
        self._attach(name, len(self._bytes) - 1)

    def share(self, name: str, source: str, *, gaps: bool = False) -> None:
        """Give a tensor the gradient of another, or a view of it, which may have gaps."""
        # The engine writes a sum into the first gradient, so gaps of the second do not matter.
        if gaps and name not in self.of:
            self.gaps.add(name)
        self._attach(name, self.of[source])

    def _attach(self, name: str, buffer: int) -> None:
        self._users[buffer] += 1
        if name in self.of:
            self._further.setdefault(name, []).append(buffer)
        else:
            self.of[name] = buffer

    def buffer_of(self, name: str) -> tuple[int, int]:
        """The number of a gradient's buffer, and its bytes."""
        buffer = self.of[name]
        return buffer, self._bytes[buffer]

    def hold(self, name: str) -> None:
        """Keep a gradient's buffer to the end: another holder has it, too."""
        self._users[self.of[name]] += 1

    def is_own(self, name: str) -> bool:
        """Whether a tensor's gradient may be written to: its buffer is its own, and dense."""
        return self._users[self.of[name]] == 1 and name not in self.gaps

    def num_users(self, name: str) -> int:
        """How many gradients and other holders have the buffer of a tensor's gradient."""
        return self._users[self.of[name]]

    def add_up(self, name: str, num_bytes: int) -> int:
        """Add the next gradient of a tensor, if it has another, to the first, and return the bytes
        that takes meanwhile; `num_bytes` are those of a gradient of it.
        """
        further = self._further.get(name)
        if not further:
            return 0
        second = further.pop(0)
        # Added in place: nothing new, and the second buffer goes.
        if self.is_own(name):
            self._release(second)
            return 0
        self._release(second)
        # The first buffer must not be written to, so the sum takes one of its own.
        self.copy(name, num_bytes)
        return num_bytes

    def copy(self, name: str, num_bytes: int) -> None:
        """Move a tensor's gradient to a buffer of its own."""
        self.free(name)
        self.allocate(name, num_bytes)

    def rename(self, name: str, other: str) -> None:
        """Give a tensor's gradient to another tensor, as its second if it has one."""
        buffer = self.of.pop(name)
        if name in self.gaps:
            self.gaps.discard(name)
            if other not in self.of:
                self.gaps.add(other)
        self._users[buffer] -= 1
        self._attach(other, buffer)

    def free(self, name: str) -> None:
        """Forget a tensor's gradient."""
        self.gaps.discard(name)
        self._release(self.of.pop(name))

    def _release(self, buffer: int) -> None:
        self._users[buffer] -= 1
        if self._users[buffer] == 0:
            self.live -= self._bytes[buffer]


def seen_through(op: Op, name: str, program: Program, strides: Strides) -> Strides | None:
    """Return the strides of an arriving gradient as the gradient of `name`, or None where
    autograd's view of it needs a copy: the backward of a view of one shape is a reshape.
    """
    family = family_of(op.target)
    shape = program.tensor[name].shape_at(1)
    if family.dim_order is not None:
        # The gradient of a permutation is its inverse: dim i of the output came from dim order[i].
        back = dict(zip(family.dim_order(op, len(shape)), strides, strict=True))
        return tuple(back[dim] for dim in range(len(shape)))
    if family.reshapes:
        return reshaped_strides(program.tensor[op.outputs[0]].shape_at(1), strides, shape)
    return strides
