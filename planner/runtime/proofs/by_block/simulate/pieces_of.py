"""The part of a whole tensor that a simulated rank has, and what is compared with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor

from planner.language.layout.axes import find_axis
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Partial, Replicate, Shard
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.runtime.state.weights import read

_CHUNK = 2**24
"""Entries compared at once."""


def value_of(
    whole: Tensor, placements: Placements, mesh: ProcessMesh, rank: int, name: str = ""
) -> Tensor:
    """Return what a rank has of a tensor; terms of a sum are random and add up to it."""
    found, seed = whole, name
    for axis, placement in placements.pairs:  # coarse cuts first
        number = mesh.number(rank, axis)
        if isinstance(placement, Shard):
            alone = Placements(((axis, placement),))
            found = read(piece_of(found.shape, alone, mesh, rank, name=name), found)
        elif isinstance(placement, Partial):
            found = _term(found, mesh.size(axis), number, f"{seed} {axis}")
        seed += f" {axis}{number}"
    return found


def _term(tensor: Tensor, parts: int, number: int, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(seed.encode()))
    # All ranks of a line draw the same terms, of which each takes its own; the first takes what is
    # left of the tensor, so that they add up to it.
    terms = [
        torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(parts - 1)
    ]
    rest = tensor - sum(terms) if terms else tensor
    return [rest, *terms][number]


def of_gradient(placements: Placements) -> Placements:
    """Return how the gradient of a value lies: whole where the value is a sum."""
    return Placements.of(
        {a: Replicate() if isinstance(p, Partial) else p for a, p in placements.pairs}
    )


def of_param_gradient(placements: Placements, mesh: ProcessMesh) -> Placements:
    """Return how a parameter's gradient lies when a block's backward ends.

    Along axes whose ranks all hold whole parameters it is a sum that a step takes later.
    """
    later = {a: Partial() for a in mesh.axes if find_axis(a).whole_params and mesh.size(a) > 1}
    return Placements.of({**dict(of_gradient(placements).pairs), **later})


def sums_over(placements: Placements, mesh: ProcessMesh) -> Iterator[tuple[int, ...]]:
    """Yield the ranks whose tensors add up to one piece: one each where nothing is a sum."""
    axes = [axis for axis, placement in placements.pairs if isinstance(placement, Partial)]
    yield from mesh.groups(*axes)


def largest_entry(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor's finite entries; 0 for none."""
    return max(map(_largest, _parts(tensor)), default=0.0)


def _largest(part: Tensor) -> float:
    if not part.numel() or part.dtype == torch.bool:
        return 0.0
    part = torch.view_as_real(part) if part.is_complex() else part
    low, high = (bound.item() for bound in part.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    return part[part.isfinite()].abs().amax().item() if bool(part.isfinite().any()) else 0.0


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an entry; infinite where shapes, dtypes or NaNs differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    return max(map(_difference, _parts(found), _parts(expected)), default=0.0)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if not ours.numel():
        return 0.0
    if not (ours.is_floating_point() or ours.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    low, high = (bound.item() for bound in (ours - theirs).aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    # Equal infinities have no difference, and NaNs in the same places are none.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (ours - theirs).abs().masked_fill_(same, 0)
    return float("inf") if bool(apart.isnan().any()) else apart.max().item()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in runs of rows, so that what is made of each stays small."""
    if tensor.dim() == 0 or tensor.numel() <= _CHUNK:
        yield tensor
        return
    rows = max(1, _CHUNK * tensor.shape[0] // tensor.numel())
    yield from tensor.split(rows)
