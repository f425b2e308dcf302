"""What ops and redistributions cost on one mesh axis of one machine, each asked once.

Equal ops are priced once, whatever their tensors are called, and strategies that leave a rank
the same shapes together. A redistribution costs what its collectives cost, of which there are
a handful, however many pairs of placements there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.compute import op_seconds
from planner.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.placement import OpSharding, Placement, Shard
from planner.sharding import strategies
from profiles import Group, Profile
from search.link_patterns import Kinds, LinkPattern, Offer, offer

Floats = NDArray[np.float64]

STATE_FACTOR = 4.0
"""Bytes that a parameter's byte costs with its gradient and optimizer state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prices:
    """Seconds and bytes on an axis of `axis_size` ranks in `group`; remembers its answers."""

    profile: Profile
    group: Group
    axis_size: int
    _ops: dict[tuple, tuple[Offer, Floats, Floats]] = field(default_factory=dict)
    _links: dict[tuple, Floats] = field(default_factory=dict)
    _collectives: dict[tuple[str, int], float] = field(default_factory=dict)

    def of_op(
        self, op: Op, program: Program, owned: set[str], segments: tuple[int, ...]
    ) -> tuple[Offer, Floats, Floats]:
        """Return an op's shardings, with the seconds and bytes of each.

        `owned` are parameters that no other op uses; their bytes are the op's.
        """
        key = (_signature(op, program, owned), segments)
        if key not in self._ops:
            offered = strategies(op, program.tensor, self.axis_size, segments=segments)
            self._ops[key] = (
                offer(offered),
                self._seconds_of(op, program, offered),
                np.array([self._bytes_of(op, program, one, owned) for one in offered]),
            )
        return self._ops[key]

    def _seconds_of(self, op: Op, program: Program, offered: tuple[OpSharding, ...]) -> Floats:
        whole = sum(op_seconds(op, program.tensor, self.profile))
        if not whole:
            return np.zeros(len(offered))  # a view, on whole tensors as on shards
        names = (*op.inputs, *op.outputs)
        local: dict[tuple[str, int | None], TensorMeta] = {}
        known: dict[tuple[int | None, ...], float] = {(None,) * len(names): whole}
        seconds = []
        for sharding in offered:
            places = (*sharding.inputs, *sharding.outputs)
            dims = tuple(place.dim if isinstance(place, Shard) else None for place in places)
            if dims not in known:
                for name, dim in zip(names, dims, strict=True):
                    if (name, dim) not in local:
                        local[name, dim] = local_tensor(program.tensor[name], dim, self.axis_size)
                tensor = {name: local[name, dim] for name, dim in zip(names, dims, strict=True)}
                known[dims] = sum(op_seconds(op, tensor, self.profile))
            seconds.append(known[dims])
        return np.array(seconds)

    def _bytes_of(self, op: Op, program: Program, sharding: OpSharding, owned: set[str]) -> float:
        total = 0.0
        for name, place in zip(op.outputs, sharding.outputs, strict=True):
            total += self.local_bytes(program.tensor[name], place)
        for name, place in zip(op.inputs, sharding.inputs, strict=True):
            if name in owned:
                total += STATE_FACTOR * self.local_bytes(program.tensor[name], place)
        return total

    def local_bytes(self, meta: TensorMeta, place: Placement) -> int:
        """Return the bytes that one rank of the axis holds of a bound tensor."""
        return meta.bytes_at(1) // (self.axis_size if isinstance(place, Shard) else 1)

    def of_link(self, pattern: LinkPattern, num_bytes: int, has_gradient: bool) -> Floats:
        """Return the seconds from each source to each ask, for a tensor of so many bytes."""
        key = pattern, num_bytes, has_gradient
        if key not in self._links:
            seconds = self.of_kinds(pattern.kinds, num_bytes, has_gradient)
            self._links[key] = seconds[pattern.index]
        return self._links[key]

    def of_kinds(self, kinds: Sequence[Kinds], num_bytes: int, has_gradient: bool) -> Floats:
        """Return the seconds of each of these moves of a tensor of so many bytes."""
        return np.array(
            [
                self._collective_s(forward, num_bytes)
                + (self._collective_s(backward, num_bytes) if has_gradient else 0.0)
                for forward, backward in kinds
            ]
        )

    def _collective_s(self, kind: str | None, num_bytes: int) -> float:
        if kind is None:
            return 0.0
        key = kind, num_bytes
        if key not in self._collectives:
            answer = self.profile.collective_seconds(kind, num_bytes, self.group)
            self._collectives[key] = answer.seconds
        return self._collectives[key]


def local_tensor(meta: TensorMeta, dim: int | None, axis_size: int) -> TensorMeta:
    """Return a bound tensor's description as one rank holds it, cut along `dim` or whole."""
    if dim is None:
        return meta
    shape = list(meta.shape_at(1))
    shape[dim] //= axis_size
    return replace(meta, shape=tuple(shape))


def _signature(op: Op, program: Program, owned: set[str]) -> tuple:
    """Return what an op's strategies and price depend on; names of tensors do not count."""

    def meta(name: str) -> tuple:
        tensor = program.tensor[name]
        return tensor.shape, tensor.dtype, tensor.kind, tensor.requires_grad, name in owned

    order: dict[str, int] = {}
    for name in op.inputs:
        order.setdefault(name, len(order))
    plain = map_refs((op.args, op.kwargs), lambda ref: Ref(str(order[ref.name])))
    return op.target, plain, tuple(map(meta, order)), tuple(map(meta, op.outputs))
