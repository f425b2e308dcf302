"""Block classes with their sizes bound, and which of their ops are equal.

Equal ops have equal strategies and prices, whatever their tensors are called, so those are
worked out once for all that have one `OpSignature`. Nothing here depends on an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from costmodel.time.block.compute import op_seconds
from planner.graph import Op, Program, TensorMeta
from planner.ops.registry import without_names
from profiles import Profile

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of an op's inputs and outputs, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSignature:
    """Ops that differ in names alone, as `planner.ops.registry.without_names` gives them.

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
