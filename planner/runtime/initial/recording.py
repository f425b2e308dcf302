"""What is noted of a function that builds a model: its ops, in order, and where tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

START = -1
"""The place in the draws where the function begins."""


class NotReplayableError(Exception):
    """A function does what can't be done again piece by piece; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a tensor lies: its storage by number, and how it is in it (in elements)."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An op that makes values.

    Attributes:
        name: the op's, without its overload.
        call: what runs it.
        args: its arguments, a `Ref` for each tensor.
        kwargs: the same by name, without device and generator.
        made: where its new outputs lie, in order; None for others.
        reads: numbers of the storages it reads.
        writes: numbers of the storages it changes or makes.
        covers: those of `writes` of which nothing is left as it was.
        draws: whether it draws random numbers.
        is_pointwise: whether an element of the result depends on the same element of arguments.
        after: the place in the draws: a random op draws on from the note of this number (or START),
            or from a state of the generator.
        dtype: the default of the moment, which ops that make floats take.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    draws: bool = False
    is_pointwise: bool = False
    after: int | Tensor = START
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def __str__(self) -> str:
        """Return it as a reader would write it: ``normal_(0.0, 0.02)``."""
        plain = [str(a) for a in self.args if not isinstance(a, Ref)]
        plain += [f"{k}={v}" for k, v in self.kwargs.items() if not isinstance(v, Ref)]
        return f"{self.name}({', '.join(plain)})"


@dataclass(slots=True)
class Recording:
    """What a function did to values. Mutable while it runs.

    Attributes:
        module: what it returned, on the meta device.
        notes: ops in order.
        sizes: bytes of each storage.
        given: values of storages that had some before any op.
        last: where the draws stand when it has ended, as `Note.after`.
        others: the function's own generators that it drew from, each with the same.
    """

    module: Any = None
    notes: list[Note] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    given: dict[int, Tensor] = field(default_factory=dict)
    last: int | Tensor = START
    others: list[tuple[torch.Generator, int | Tensor]] = field(default_factory=list)
    _numbers: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)

    def ref(self, tensor: Tensor) -> Ref:
        """Return where a tensor lies."""
        storage = tensor.untyped_storage()
        # (The storage is kept, so that no other gets its address.)
        number, _ = self._numbers.setdefault(storage._cdata, (len(self.sizes), storage))
        if number == len(self.sizes):
            self.sizes.append(storage.nbytes())
        elif storage.nbytes() > self.sizes[number]:
            self.sizes[number] = storage.nbytes()
        return Ref(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def give(self, tensor: Tensor) -> Ref:
        """Return where a tensor lies whose values no op made: they are kept as they are now."""
        ref = Ref(len(self.sizes), tensor.dtype, tuple(tensor.shape), (), 0)
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.given[ref.storage] = values.reshape(-1).view(torch.uint8)
        self.sizes.append(values.nbytes)
        return replace(ref, stride=tuple(values.stride()))

    def is_whole(self, ref: Ref) -> bool:
        """Whether a tensor is all of its storage, in the order of its elements."""
        return ref.num_bytes == self.sizes[ref.storage] and _is_dense(ref)

    def digest(self, known: Mapping[str, Tensor]) -> str:
        """Return what two recordings have in common if and only if they make the same values.

        `known` are those of the module's tensors that have values, which no op made.
        """
        found = hashlib.sha256()
        for note in self.notes:
            after = note.after if isinstance(note.after, int) else digest_of(note.after)
            found.update(
                f"{note.name} {note.args} {note.kwargs} {note.made} {after} {note.dtype}\n".encode()
            )
        for name, tensor in (*self.given.items(), *known.items()):
            found.update(f"{name} {digest_of(tensor.cpu())}\n".encode())
        return found.hexdigest()


def _is_dense(ref: Ref) -> bool:
    expected = 1
    for size, stride in zip(reversed(ref.shape), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return ref.offset == 0


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's values."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
