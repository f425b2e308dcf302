"""ZeRO's gathers in 8 bits, of weights that are multiplied in 8 bits with one scale for all of one.

A unit of FSDP2 is gathered as one message: each rank's shards of all its parameters in turn. Of a
weight whose every product casts it with one scale, a rank casts its shard before it sends it, with
the scale of the whole weight, of which ranks first exchange the largest values:

    this rank's shards    [w in 8 bits | v in 8 bits | norms, biases in 16]
    gathered              of all ranks; put into FSDP2's message in 16 bits

Scales are powers of two and the cast rounds once, so to cast again in a product changes no number:
what is trained is the same to the last bit as with gathers in 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from planner.runtime.stage.calls.narrow import E4M3, scale_for

# (By its name from torch 2.13 on, which warns of the one before.)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_narrow(unit: nn.Module, names: Collection[str]) -> None:
    """Let a unit of FSDP2 gather these of its parameters in 8 bits; as before where it gathers
    experts apart from the rest.
    """
    assert isinstance(unit, FSDPModule)
    if names and len(groups_of(unit)) == 1:
        unit.set_custom_all_gather(NarrowAllGather(unit, names))


def groups_of(unit: FSDPModule) -> list:
    """Return a unit's groups of parameters, which FSDP2 gathers apart from each other."""
    state = unit._get_fsdp_state()
    # (Before torch 2.13 a unit has one group.)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class NarrowAllGather(AllGather):
    """Gathers some parameters of a unit in 8 bits, by their names in it."""

    def __init__(self, unit: FSDPModule, names: Collection[str]) -> None:
        self._unit, self._names = unit, frozenset(names)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for FSDP2's message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill the message of all ranks; `input_tensor` is this rank's part of it.

        (FSDP2 calls it on a stream of its own, so that it runs beside compute as it is.)
        """
        (params,) = groups_of(self._unit)
        sizes = [param._sharded_param_data.numel() for param in params.fsdp_params]
        is_narrow = [param._module_info.param_name in self._names for param in params.fsdp_params]
        places = [
            slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)
        ]
        narrow = [place for place, of in zip(places, is_narrow, strict=True) if of]
        wide = [place for place, of in zip(places, is_narrow, strict=True) if not of]
        back, cast = _cast([input_tensor[place] for place in narrow], group)
        parts = [*cast, *(input_tensor[place].view(torch.uint8) for place in wide)]
        # What is in 16 bits begins at a whole number of its own.
        num_narrow = sum(part.numel() for part in cast)
        filled = input_tensor.new_zeros(num_narrow % input_tensor.element_size(), dtype=torch.uint8)
        parts.insert(len(cast), filled)
        mine = torch.cat(parts)
        count = group.size()
        theirs = mine.new_empty(count * len(mine))
        _all_gather(theirs, mine, group=group)
        rows, message = theirs.view(count, -1), output_tensor.view(count, -1)
        start = 0
        for place, of in zip(narrow, back, strict=True):
            end = start + place.stop - place.start
            into = message[:, place]
            into.copy_(rows[:, start:end].view(E4M3))
            into.mul_(of)
            start = end
        start += len(filled)
        for place in wide:
            end = start + (place.stop - place.start) * input_tensor.element_size()
            message[:, place] = rows[:, start:end].contiguous().view(input_tensor.dtype)
            start = end


def _cast(shards: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """Return what each weight is to be multiplied by, and this rank's shards in bytes."""
    largest = torch.stack([torch.linalg.vector_norm(part, torch.inf) for part in shards])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scales = scale_for(largest, E4M3).to(largest.dtype)
    cast = [
        (part * scale).to(E4M3).view(torch.uint8)
        for part, scale in zip(shards, scales, strict=True)
    ]
    return scales.reciprocal(), cast
