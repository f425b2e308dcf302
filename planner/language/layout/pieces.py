"""The part of a tensor that a rank holds: the rule by which everything is cut; torch-free.

A rank's local tensor is a box in the simplest case. Segments (the q, k and v of a fused
projection) and two axes on one dim make it several, so a dim is described by *runs*: the
stretches of the whole dim that the local dim consists of, in local order.

    whole dim 0..11, S(0)x3 over tp 2:   rank 0 holds runs (0, 2) (4, 2) (8, 2)

Weights, first values, checkpoints, gradients of tied parameters and messages between stages are
pieces: all of them take `piece_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from planner.errors import LayoutError
from planner.language.layout.boxes import Box, Shape
from planner.language.layout.placement import Shard, piece_in
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.layout.sharing import shard_dim

CHUNK_BYTES = 64 * 2**20
"""Most bytes stored as one chunk (if a row has no more): what a reader of a slice reads at most
beside it, and what replicas deal among each other when they share the writing.
"""


Runs = tuple[tuple[int, int], ...]
"""(start, length) of stretches of a dim, in local order; none for an empty piece."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the whole tensor, and where it lies in the local one."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor of a `shape`: the runs of each of its dims."""

    shape: Shape
    runs: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Piece:
        """Return all of a tensor."""
        shape = tuple(shape)
        return cls(shape, tuple(((0, size),) if size else () for size in shape))

    @property
    def local_shape(self) -> Shape:
        """The shape of the local tensor."""
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def cut(self, placement: Shard, parts: int, number: int) -> Piece:
        """Return part `number` of each of its segments of a dim, which `parts` divides."""
        length = self.local_shape[placement.dim] // placement.segments
        each = length // parts
        # The rank's stretch of every segment, in the coordinates of what is left so far.
        pieces = (
            piece_in(s, number, parts, mirrored=placement.mirrored)
            for s in range(placement.segments)
        )
        spans = [(s * length + piece * each, each) for s, piece in enumerate(pieces)]
        return self._taking(placement.dim, spans)

    def chunk(self, parts: int, number: int) -> Piece:
        """Return part `number` along `shard_dim` as `torch.chunk` cuts: the last may be short or
        none.
        """
        dim = shard_dim(self.local_shape, parts)
        size = self.local_shape[dim]
        each = -(-size // parts)
        start = min(size, number * each)
        return self._taking(dim, [(start, min(each, size - start))])

    @property
    def span(self) -> Box:
        """The box from its first entry that is as large as it: the piece itself, where each of its
        dims is one run.
        """
        firsts = (
            runs[0][0] if runs else size for runs, size in zip(self.runs, self.shape, strict=True)
        )
        return tuple((first, first + n) for first, n in zip(firsts, self.local_shape, strict=True))

    def _taking(self, dim: int, spans: Iterable[tuple[int, int]]) -> Piece:
        runs = tuple(_merged(run for span in spans for run in _select(self.runs[dim], *span)))
        return replace(self, runs=(*self.runs[:dim], runs, *self.runs[dim + 1 :]))

    def chunks(self, element_bytes: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield boxes that together are the piece, each of whole rows and about `most_bytes`.

        A tensor without elements is one box, which says that it is there.
        """
        if 0 in self.shape:
            everything = tuple((0, size) for size in self.shape)
            yield Chunk(everything, everything)
            return
        # A run of each dim makes a box; only dim 0 is cut further, so that a chunk has whole rows.
        located = [list(_located(runs)) for runs in self.runs]
        for place in product(*located):
            lengths = [length for _, _, length in place]
            row = prod(lengths[1:]) * element_bytes
            step = max(1, most_bytes // max(1, row))
            # (A number has no dims, and is one chunk.)
            for first in range(0, lengths[0], step) if place else (0,):
                box, local = [], []
                for dim, (start, at, length) in enumerate(place):
                    offset, size = (first, min(step, length - first)) if dim == 0 else (0, length)
                    box.append((start + offset, start + offset + size))
                    local.append((at + offset, at + offset + size))
                yield Chunk(tuple(box), tuple(local))


def _select(runs: Runs, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a stretch of the local dim."""
    at = 0
    for first, size in runs:
        # The run takes local places `at` to `at + size`: its part of the stretch, moved to the
        # whole dim.
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            yield first + low - at, high - low
        at += size


def _merged(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs that follow each other."""
    last: tuple[int, int] | None = None
    for start, length in runs:
        if last is not None and last[0] + last[1] == start:
            last = last[0], last[1] + length
            continue
        if last is not None:
            yield last
        last = start, length
    if last is not None:
        yield last


def _located(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the whole dim, start in the local one, length) of each run."""
    at = 0
    for start, length in runs:
        yield start, at, length
        at += length


def piece_of(
    shape: Iterable[int],
    placements: Placements,
    mesh: ProcessMesh,
    rank: int,
    chunked: Sequence[str] = (),
    *,
    name: str = "",
) -> Piece:
    """Return what a rank of a mesh holds of a tensor; terms of a sum are whole.

    Coarse cuts come first, and each further axis cuts what those before it left. Then ZeRO cuts
    chunks of that over the ranks of the axes `chunked` (`Sharing`). Raises LayoutError, which
    gives the tensor's `name`, where a size does not divide.
    """
    piece = Piece.whole(shape)
    for axis, placement in placements.pairs:
        if not isinstance(placement, Shard):
            continue
        parts = mesh.size(axis)
        if piece.local_shape[placement.dim] % (parts * placement.segments):
            raise LayoutError(
                f"{axis}={parts} does not divide dim {placement.dim} of {name or 'a tensor'} (size "
                f"{piece.local_shape[placement.dim]}); search again with another {axis}"
            )
        piece = piece.cut(placement, parts, mesh.number(rank, axis))
    if chunked:
        piece = piece.chunk(mesh.size(*chunked), mesh.number(rank, *chunked))
    return piece
