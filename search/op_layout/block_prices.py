"""What ops and redistributions cost on one mesh axis of one machine, each looked up once.

Equal ops have equal strategies and prices, whatever their tensors are called: those of one
`OpSignature` are priced once, and strategies that leave a rank the same shapes together. A
redistribution costs what its collectives cost, of which there are a handful, however many pairs of
placements there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from costmodel.time.block.compute import gather_seconds, op_seconds
from planner.deadline import check_time
from planner.language.graph import Op, Program, TensorMeta
from planner.language.layout.placement import Placement, Shard
from planner.language.layout.redistribute import (
    GATHER_SAMPLES,
    goes_back,
    inner_collectives,
)
from planner.language.ops.call import local_shape
from planner.language.ops.record import family_of
from planner.language.ops.registry import local_ops, strategies_of, without_names
from profiles import Group, Profile
from search.op_layout.reshard_edges import (
    MOVES,
    NO_WAY,
    Dims,
    EdgePattern,
    Strategies,
    shared_strategies,
)

Floats = NDArray[np.float64]
STATE_FACTOR = 4.0
"""Bytes that a parameter's byte costs with its gradient and optimizer state."""

AXIS = "tp"
"""Of local forms, which name the axis that they exchange on."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of an op's inputs and outputs, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSignature:
    """Ops that differ in names alone, as `planner.language.ops.registry.without_names` gives them.

    `is_owned` says of each input whether it is a parameter that no other op uses.
    """

    op: Op
    metas: tuple[TensorMeta, ...]
    is_owned: tuple[bool, ...]

    @cached_property
    def tensor(self) -> Mapping[str, TensorMeta]:
        """Tensors by name."""
        return {meta.name: meta for meta in self.metas}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of inputs and outputs, in order, repeats kept."""
        return (*self.op.inputs, *self.op.outputs)

    @cached_property
    def shapes(self) -> Shapes:
        """Whole shapes of inputs and outputs."""
        return tuple(self.tensor[name].shape_at(1) for name in self.names)


@lru_cache(maxsize=16384)
def _signature(op: Op, metas: tuple[TensorMeta, ...], is_owned: tuple[bool, ...]) -> OpSignature:
    """Return the shared object for these ops."""
    return OpSignature(op=op, metas=metas, is_owned=is_owned)


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundClass:
    """A block class at one microbatch size; `shared` are parameters other blocks use too."""

    class_index: int
    program: Program
    shared: frozenset[str] = frozenset()

    @cached_property
    def owned(self) -> frozenset[str]:
        """Parameters that exactly one op argument of the model uses (and no output hands on)."""
        program = self.program
        count = Counter(name for op in program.ops for name in op.inputs)
        return frozenset(
            name
            for name in program.params
            if program.tensor[name].kind == "param"
            and count[name] == 1
            and name not in self.shared
            and name not in program.outputs
        )

    @cached_property
    def signatures(self) -> tuple[OpSignature, ...]:
        """What each op is."""
        return tuple(
            _signature(
                *without_names(op, self.program.tensor),
                tuple(name in self.owned for name in op.inputs),
            )
            for op in self.program.ops
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSeconds:
    """Seconds of ops by the shapes that they are given, whatever left these; remembers them."""

    profile: Profile
    _known: dict[tuple, dict[Shapes, float]] = field(default_factory=dict)

    def of(self, signature: OpSignature) -> Callable[[Shapes], float]:
        """Return what tells the seconds, forward and backward, of such an op on shapes."""
        op = signature.op
        metas = [signature.tensor[name] for name in signature.names]
        # An op's seconds follow from its target, arguments, dtypes and local shapes, wherever its
        # tensors lie: strategies and microbatch sizes share answers.
        rest = tuple((meta.dtype, meta.kind, meta.requires_grad) for meta in metas)
        known = self._known.setdefault((op.target, op.args, op.kwargs, rest), {})

        def seconds(shapes: Shapes) -> float:
            if shapes not in known:
                local = {
                    name: TensorMeta(
                        name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=needs
                    )
                    for name, shape, (dtype, kind, needs) in zip(
                        signature.names, shapes, rest, strict=True
                    )
                }
                known[shapes] = sum(op_seconds(op, local, self.profile))
            return known[shapes]

        return seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Prices:
    """Seconds and bytes on an axis of `axis_size` ranks in `group`; remembers its answers."""

    ops: OpSeconds
    """Seconds of ops."""
    group: Group
    """The ranks of the axis, as they lie in the cluster."""
    axis_size: int
    """How many they are."""
    _ops: dict[tuple, tuple[Strategies, Floats, Floats]] = field(default_factory=dict)
    """Strategies of an op with the seconds and bytes of each, by signature and segments."""
    _moves: dict[tuple[int, bool], Floats] = field(default_factory=dict)
    """Seconds of each of `MOVES`, by bytes of the tensor and whether it has a gradient."""
    _collectives: dict[tuple[str, int], float] = field(default_factory=dict)
    """Seconds of a collective, by kind and bytes of the whole tensor."""

    def of_op(
        self, signature: OpSignature, segments: tuple[int, ...]
    ) -> tuple[Strategies, Floats, Floats]:
        """Return an op's shardings, with the seconds and bytes of each.

        Parameters that no other op uses count with its bytes, their gradients with its seconds.
        """
        key = signature, segments
        if key not in self._ops:
            check_time()
            strategies = shared_strategies(
                strategies_of(signature.op, signature.metas, self.axis_size, segments)
            )
            # Seconds of an op: its own, adding its parameters'
            # gradients to their sums, its collectives.
            dims = strategies.dims
            seconds = self._seconds_of(signature, dims) + self._adding_s(signature, dims)
            seconds += self._inner_s(signature, strategies)
            self._ops[key] = strategies, seconds, self._bytes_of(signature, dims)
        return self._ops[key]

    def _seconds_of(self, signature: OpSignature, dims: Sequence[Dims]) -> Floats:
        """Return an op's seconds with each of its tensors cut along these dims, or whole."""
        seconds_on, whole = self.ops.of(signature), signature.shapes
        if not seconds_on(whole):
            return np.zeros(len(dims))  # a view, on whole tensors as on shards
        # Strategies that leave a rank the same shapes take
        # as long: each set of shapes is priced once.
        known: dict[Dims, float] = {}
        for cut in dims:
            if cut not in known:
                known[cut] = seconds_on(tuple(map(self._local_shape, whole, cut)))
        return np.array([known[cut] for cut in dims])

    def _inner_s(self, signature: OpSignature, strategies: Strategies) -> Floats:
        """Return what each strategy's local form exchanges inside its ops, such as a loss in
        pieces or a table cut by rows.
        """
        op = signature.op
        found = np.zeros(len(strategies.values))
        gathers = op.target == GATHER_SAMPLES
        if family_of(op.target).local_form is None and not gathers:
            return found
        for index, (sharding, dims) in enumerate(
            zip(strategies.values, strategies.dims, strict=True)
        ):
            if gathers:
                found[index] = self._gathering_s(signature, dims)
                continue
            if not any(isinstance(place, Shard) for place in (*sharding.inputs, *sharding.outputs)):
                continue
            # Sharded, the op runs in steps between which ranks sum or gather what each has.
            form = local_ops(op, sharding, signature.tensor, axis=AXIS, axis_size=self.axis_size)
            local = self._local_tensors(signature, dims)
            for meta in form.tensors:
                shape = local_shape(meta.shape_at(1), sharding.outputs[0], self.axis_size)
                local[meta.name] = replace(meta, shape=shape)
            for each in form.ops:
                # Some collectives come again in the backward, on the gradient.
                times = 2 if goes_back(each, local) else 1
                for kind, num_bytes in inner_collectives(each, local):
                    found[index] += times * self._collective_s(kind, num_bytes)
        return found

    def _gathering_s(self, signature: OpSignature, dims: Dims) -> float:
        """Return seconds of an op that gathers samples, there and back; of replicas of one rank for
        each of this axis.
        """
        op, local = signature.op, self._local_tensors(signature, dims)
        there_s = sum(gather_seconds(op, local, self.ops.profile, apart=self.axis_size))
        return there_s * (2 if goes_back(op, local) else 1)

    def _local_tensors(self, signature: OpSignature, dims: Dims) -> dict[str, TensorMeta]:
        return {
            name: replace(signature.tensor[name], shape=self._local_shape(shape, dim))
            for name, shape, dim in zip(signature.names, signature.shapes, dims, strict=True)
        }

    def _local_shape(self, shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        if dim is None:
            return shape
        return (*shape[:dim], shape[dim] // self.axis_size, *shape[dim + 1 :])

    def _bytes_of(self, signature: OpSignature, dims: Sequence[Dims]) -> Floats:
        sizes = [signature.tensor[name].bytes_at(1) for name in signature.names]
        # Outputs count once: what the microbatch may keep of the op for its backward.
        factors = (
            *(STATE_FACTOR * own for own in signature.is_owned),
            *(1.0 for _ in signature.op.outputs),
        )
        return self._sum_of_local(sizes, dims, factors)

    def _adding_s(self, signature: OpSignature, dims: Sequence[Dims]) -> Floats:
        """Return what adding its parameters' gradients to their sums takes."""
        if not any(signature.is_owned):
            return np.zeros(len(dims))
        metas = [signature.tensor[name] for name in signature.names]
        owned = (*signature.is_owned, *(False for _ in signature.op.outputs))
        factors = [
            self._adding_s_per_element * (own and meta.requires_grad)
            for own, meta in zip(owned, metas, strict=True)
        ]
        return self._sum_of_local([meta.numel_at(1) for meta in metas], dims, factors)

    def _sum_of_local(
        self, sizes: Sequence[int], dims: Sequence[Dims], factors: Sequence[float]
    ) -> Floats:
        """Return, for each way to cut tensors of these sizes, the sum of what a rank has."""
        whole = np.array(sizes, dtype=np.float64)
        part = np.array([size // self.axis_size for size in sizes], dtype=np.float64)
        # (strategy, tensor)
        is_cut = np.array([[dim is not None for dim in cut] for cut in dims], dtype=np.bool_)
        return np.asarray(np.where(is_cut, part, whole) @ np.array(factors))

    def adding_s(self, meta: TensorMeta, place: Placement) -> float:
        """Return what adding a microbatch's gradient of a bound parameter to the sum so far takes,
        but for what no placement changes.
        """
        # Launches are left out: they are as many wherever the parameter lies.
        numel = meta.numel_at(1) // (self.axis_size if isinstance(place, Shard) else 1)
        return numel * self._adding_s_per_element * meta.requires_grad

    @cached_property
    def _adding_s_per_element(self) -> float:
        """Of a sum in float32; the profile's answer is a line."""
        return self.ops.profile.step_seconds(
            "accumulate", num_bytes=4.0, num_tensors=0, num_calls=0
        ).seconds

    def local_bytes(self, meta: TensorMeta, place: Placement) -> int:
        """Return the bytes that one rank of the axis holds of a bound tensor."""
        return meta.bytes_at(1) // (self.axis_size if isinstance(place, Shard) else 1)

    def of_edge(self, pattern: EdgePattern, num_bytes: int, has_gradient: bool) -> Floats:
        """Return the seconds from each source to each requirement, for a tensor's bytes."""
        return self.of_moves(num_bytes, has_gradient)[pattern.moves]

    def of_moves(self, num_bytes: int, has_gradient: bool) -> Floats:
        """Return the seconds of each of `MOVES` of a tensor of so many bytes."""
        key = num_bytes, has_gradient
        if key not in self._moves:
            self._moves[key] = np.array(
                [
                    self._collective_s(forward, num_bytes)
                    + (self._collective_s(backward, num_bytes) if has_gradient else 0.0)
                    for forward, backward in MOVES
                ]
            )
        return self._moves[key]

    def _collective_s(self, kind: str | None, num_bytes: int) -> float:
        if kind is None:
            return 0.0
        if kind == NO_WAY[0]:
            return inf
        key = kind, num_bytes
        if key not in self._collectives:
            answer = self.ops.profile.collective_seconds(kind, num_bytes, self.group)
            self._collectives[key] = answer.seconds
        return self._collectives[key]
