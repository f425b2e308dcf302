"""What a rank has of a training's tensors, by their names in a checkpoint.

model.FQN              a parameter or buffer, in the dtype it rests in: of a 16-bit weight
                       the fp32 copy that the optimizer trains (the weight is that, rounded)
replica.IofN.FQN       a buffer that replica I of N has moved by its own samples (I > 0)
optim.STATE.FQN        the optimizer's state of a parameter, shaped like it
average.FQN            the average of a parameter over steps; average_count: of how many updates
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.language.graph import TensorMeta
from planner.language.layout.pieces import Chunk, Piece
from planner.language.lowering.holdings import Holding, Holdings, model_key
from planner.runtime.state.rank_state import RankState
from planner.runtime.state.weights import local


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a stored tensor.

    Attributes:
        key: its name in the checkpoint.
        piece: which part of the whole it is.
        tensors: local tensors with these values: several where stages of a rank share a parameter.
        holding: what decides which of its chunks this rank writes.
        moves: whether a forward changes it, so that a copy can't wait until the optimizer steps.
        fallback: the name to read where the checkpoint has no `key`.
    """

    key: str
    piece: Piece
    tensors: tuple[Tensor, ...]
    holding: Holding
    moves: bool = False
    fallback: str = ""

    def __post_init__(self) -> None:
        """A piece that is not the tensor's would be stored in the wrong place."""
        for tensor in self.tensors:
            assert tuple(tensor.shape) == self.piece.local_shape, (self.key, tensor.shape)

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks of the piece with their numbers."""
        return enumerate(self.piece.chunks(self.tensors[0].element_size()))

    def written(self) -> Iterator[Chunk]:
        """Yield the chunks that this rank writes."""
        return (chunk for at, chunk in self.chunks() if self.holding.writes(self.key, at))


def model_parts(state: RankState) -> list[Part]:
    """Return this rank's parts of parameters and buffers."""
    params = state.trained.stepped_by_name()
    parts = []
    for name, held in Holdings(state.graph, state.plan).of(dist.get_rank()).items():
        fqn = held.meta.fqn
        if held.meta.kind == "param":
            tensors = tuple(map(local, params[fqn]))
        else:
            tensors = tuple(s.passed[name] for s in state.stages.values() if name in s.passed)
        key, fallback = held.key, ""
        if held.replica is not None and held.replica[0] > 0:
            key, fallback = f"replica.{held.replica[0]}of{held.replica[1]}.{fqn}", key
        parts.append(
            Part(
                key=key,
                piece=held.piece,
                tensors=tensors,
                holding=held,
                moves=held.meta.kind == "buffer",
                fallback=fallback,
            )
        )
    # What no block uses, and what the preamble reads, each rank has whole, on the CPU.
    is_first = dist.get_rank() == 0
    return parts + [
        whole_part(model_key(fqn), tensor, is_written=is_first and fqn in state.outside.unused)
        for fqn, tensor in state.outside.tensors.items()
    ]


def optimized_parts(
    state: RankState, parts: Iterable[Part]
) -> tuple[dict[str, list[nn.Parameter]], dict[str, Part]]:
    """Return what the optimizer steps on here, by name, and which part of the whole each is.

    `parts` are those of the model. Where a parameter is made whole for the optimizer, its owner has
    all of it: one rank among those with its pieces, so it writes what it would of its piece.
    """
    stepped = state.trained.optimized_by_name()
    found = {}
    for part in parts:
        fqn = part.holding.meta.fqn
        if part.holding.meta.kind == "param" and fqn in stepped:
            tensors = tuple(map(local, stepped[fqn]))
            is_whole = tuple(tensors[0].shape) == part.piece.shape
            piece = Piece.whole(part.piece.shape) if is_whole else part.piece
            found[fqn] = replace(part, piece=piece, tensors=tensors)
    return stepped, found


def average_parts(state: RankState, parts: Iterable[Part]) -> list[Part]:
    """Return this rank's parts of averages, if there are; `parts` are those of the model."""
    averages = state.averages
    if averages is None:
        return []
    params = {part.holding.meta.fqn: part for part in parts}
    is_first = state.mesh.global_rank == 0
    return [
        replace(
            params[fqn],
            key=f"average.{fqn}",
            tensors=tuple(map(local, copies)),
            # A training that was saved without averages begins them from its weights.
            fallback=params[fqn].key,
        )
        for fqn, copies in averages.tensors.items()
    ] + [whole_part("average_count", averages.count, is_written=is_first)]


def whole_part(key: str, tensor: Tensor, *, is_written: bool = True) -> Part:
    """Return the part that is all of a tensor."""
    meta = TensorMeta(
        name=key,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        kind="buffer",
        fqn=key.partition(".")[2],
    )
    piece = Piece.whole(tensor.shape)
    held = Holding(meta=meta, piece=piece, copies=1, copy=0 if is_written else None)
    return Part(key=key, piece=piece, tensors=(tensor,), holding=held)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as files have it: ``float32``."""
    return str(dtype).removeprefix("torch.")
