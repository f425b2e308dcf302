"""First values brought to their places: what a rank holds, on its device or in host memory.

    from                    how each rank gets its pieces
    a module with values    rank 0 sends them all, some MiB at a time
    a recording             each makes its own, drawing from rank 0's state; nothing is sent

A place takes some rows of a tensor at a time, so beside what a rank holds there is one message,
or what `replay` makes at once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import ModelError
from planner.language.layout.pieces import Piece
from planner.runtime.initial.recording import Recording
from planner.runtime.initial.replay import Replay
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.process.groups.together import together

MESSAGE_BYTES = 16 * 2**20
"""Sent at once: a message for each tensor would cost a latency each."""

_ALL = 2**62


@dataclass(frozen=True, slots=True)
class Place:
    """A local tensor, and which part of a whole one it is."""

    piece: Piece
    tensor: Tensor

    @torch.no_grad()
    def take(self, first: int, rows: Tensor) -> None:
        """Copy what it holds of some rows of the whole tensor, the first being row `first`."""
        if not self.piece.shape:
            self.tensor.copy_(rows)
            return
        last = first + rows.shape[0]
        for chunk in self.piece.chunks(self.tensor.element_size(), _ALL):
            (start, stop), *others = chunk.box
            # The rows that are both in this message and in the chunk.
            low, high = max(start, first), min(stop, last)
            if low < high:
                (at, _), *own = chunk.local
                here = slice(at + low - start, at + high - start)
                there = slice(low - first, high - first)
                self.tensor[(here, *(slice(*box) for box in own))].copy_(
                    rows[(there, *(slice(*box) for box in others))]
                )


Places = Mapping[str, Sequence[Place]]
"""All that a rank holds of tensors, by the user's names."""


class FirstValues(Protocol):
    """Where first values come from."""

    def fill(self, places: Places, names: Iterable[str]) -> None:
        """Bring values to places. Every rank calls it with the same `names`, those of all ranks."""


class ModuleValues:
    """The values of rank 0's module, so that replicas start equal however scripts seeded them."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh

    def fill(self, places: Places, names: Iterable[str]) -> None:
        """See `FirstValues`. Raises ModelError for a tensor that has no values."""
        by_dtype: dict[torch.dtype, list[tuple[str, int, Tensor]]] = defaultdict(list)
        for name in names:
            tensor = find(self._module, name)
            if tensor.is_meta:
                raise ModelError(
                    f"{name!r} is on the meta device and has no values; build the model on the "
                    "CPU before applying a plan, give planner.apply the function that builds it, "
                    "or `weights` to take them from"
                )
            by_dtype[tensor.dtype] += [(name, *rows) for rows in _in_rows(tensor)]
        for pieces in by_dtype.values():
            for message in _messages(pieces):
                # Every rank takes part in every message, and keeps the rows that it has a place
                # for.
                for name, first, rows in self._from_rank_0(message):
                    for place in places.get(name, ()):
                        place.take(first, rows)

    def _from_rank_0(self, pieces: list[tuple[str, int, Tensor]]) -> list[tuple[str, int, Tensor]]:
        if dist.get_world_size() == 1:
            return pieces
        device = self._mesh.device
        flat = torch.cat([rows.to(device).reshape(-1) for _, _, rows in pieces])
        # (A complex or boolean tensor is sent as its bytes.)
        dist.broadcast(flat.view(torch.uint8), src=0)
        parts = flat.split([rows.numel() for _, _, rows in pieces])
        return [
            (name, first, part.view(rows.shape))
            for (name, first, rows), part in zip(pieces, parts, strict=True)
        ]


class RecordedValues:
    """What a recorded function makes, from the state of rank 0's generator.

    Each rank makes the tensors it holds a piece of. `to_the_end` says that draws go on to the end
    of the function, so that the generator stands where the function would leave it.
    """

    def __init__(self, recording: Recording, mesh: Mesh, *, to_the_end: bool = True) -> None:
        self._recording, self._mesh, self._to_the_end = recording, mesh, to_the_end

    def fill(self, places: Places, names: Iterable[str]) -> None:
        """See `FirstValues`. Raises ModelError for a tensor that nothing gives values to, and
        where the function does not do the same on all ranks.
        """
        module = self._recording.module
        tensors = {name: find(module, name) for name in names}
        refs = {name: self._recording.ref(t) for name, t in tensors.items() if t.is_meta}
        replay = Replay(self._recording, refs)
        for name in refs:
            if not replay.origin(name):
                raise ModelError(
                    f"nothing gives {name!r} its first values; set them in the function that "
                    "builds the model, or give `weights` to take them from"
                )
        known = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        state = self._agreed_state(known)
        for name, tensor in known.items():
            for place in places.get(name, ()):
                place.take(0, tensor)
        wanted = {name: ref for name, ref in refs.items() if places.get(name)}
        sinks = {name: _sink(places[name]) for name in wanted}
        own = torch.default_generator.get_state()
        end = Replay(self._recording, wanted).run(state, sinks, to_the_end=self._to_the_end)
        # (The generator then stands where it would after building the model itself.)
        if torch.equal(own, state):  # a rank that was seeded otherwise goes on with its own
            torch.default_generator.set_state(end)

    @staticmethod
    def peak_bytes(recording: Recording) -> int:
        """Return the most host memory that making any tensor takes beside the pieces that stay."""
        module = recording.module
        named = (*module.named_parameters(), *module.named_buffers())
        refs = {name: recording.ref(tensor) for name, tensor in named if tensor.is_meta}
        return Replay(recording, refs).peak_bytes()

    def _agreed_state(self, known: Mapping[str, Tensor]) -> Tensor:
        """Return rank 0's state of the generator, where all ranks recorded the same."""
        own = torch.default_generator.get_state()
        said = together(
            self._mesh.control, lambda: (self._recording.digest(known), own.numpy().tobytes())
        )
        if len({digest for digest, _ in said}) > 1:
            raise ModelError(
                "the function that builds the model does not do the same on all ranks; seed in it "
                "what it draws elsewhere than from torch, or build the model before planner.apply"
            )
        return torch.frombuffer(bytearray(said[0][1]), dtype=torch.uint8)


class NoValues:
    """Leaves places as they are, for tensors that get their values later, or never."""

    def fill(self, places: Places, names: Iterable[str]) -> None:
        """Do nothing, see `FirstValues`."""


def find(module: nn.Module, name: str) -> Tensor:
    """Return a parameter, buffer or other tensor of a module. Raises ModelError for none."""
    try:
        found: Any = operator.attrgetter(name)(module)
    except AttributeError:
        raise ModelError(
            f"the model has no tensor {name!r}; apply the plan to the model it was made for"
        ) from None
    assert isinstance(found, Tensor)
    return found.detach()


def _sink(places: Sequence[Place]) -> Any:
    def take(first: int, rows: Tensor) -> None:
        for place in places:
            place.take(first, rows)

    return take


def _in_rows(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of about the size of a message at most."""
    if not tensor.dim() or tensor.nbytes <= MESSAGE_BYTES:
        yield 0, tensor
        return
    step = max(1, MESSAGE_BYTES // (prod(tensor.shape[1:]) * tensor.element_size()))
    for first in range(0, tensor.shape[0], step):
        yield first, tensor[first : first + step]


def _messages(
    pieces: Iterable[tuple[str, int, Tensor]],
) -> Iterator[list[tuple[str, int, Tensor]]]:
    """Group pieces of one dtype up to the size of a message."""
    message: list[tuple[str, int, Tensor]] = []
    filled = 0
    for piece in pieces:
        if message and filled + piece[2].nbytes > MESSAGE_BYTES:
            yield message
            message, filled = [], 0
        message.append(piece)
        filled += piece[2].nbytes
    if message:
        yield message
