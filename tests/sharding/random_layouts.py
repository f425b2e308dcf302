"""Random legal layouts of a program: the fuzzer's source of placements."""

from __future__ import annotations

import random

from planner.language.graph import Program, TensorMeta
from planner.language.layout.placement import (
    OpSharding,
    Partial,
    Placement,
    Replicate,
    Shard,
    has_way,
)
from planner.language.ops.call import divides
from planner.language.ops.registry import segment_counts, strategies
from planner.language.plan import ClassLayout


def random_layout(program: Program, rng: random.Random, axis_size: int) -> ClassLayout:
    """Any strategy for any op and any placement at the boundary, drawn at random."""
    ops: list[tuple[str, OpSharding]] = []
    wanted: dict[str, list[Placement]] = {}
    made: dict[str, Placement] = {}
    counts = segment_counts(program, rng.choice([1, 2]))
    for op in program.ops:
        offered = [
            sharding
            for sharding in strategies(
                op, program.tensor, axis_size, segments=counts, mirrored=True
            )
            if all(
                has_way(made.get(name, Replicate()), placement)
                for name, placement in zip(op.inputs, sharding.inputs, strict=True)
            )
        ]
        sharding = (
            rng.choice(offered[1:]) if len(offered) > 1 and rng.random() < 0.8 else offered[0]
        )
        ops.append((op.name, sharding))
        made |= zip(op.outputs, sharding.outputs, strict=True)
        for name, placement in zip(op.inputs, sharding.inputs, strict=True):
            wanted.setdefault(name, []).append(placement)
    params = tuple(
        str(_at_rest(program.tensor[name], wanted.get(name, []), rng, axis_size))
        for name in program.params
    )
    return ClassLayout(
        class_index=0,
        inputs=tuple(str(_anywhere(program.tensor[n], rng, axis_size)) for n in program.inputs),
        params=params,
        outputs=tuple(str(_anywhere(program.tensor[n], rng, axis_size)) for n in program.outputs),
        ops=tuple((name, str(sharding)) for name, sharding in ops),
    )


def _at_rest(
    meta: TensorMeta, wanted: list[Placement], rng: random.Random, axis_size: int
) -> Placement:
    fitting = [p for p in wanted if not isinstance(p, Partial)]
    if meta.kind != "param":
        return Replicate()
    return rng.choice(fitting) if fitting and rng.random() < 0.8 else _shard(meta, rng, axis_size)


def _shard(meta: TensorMeta, rng: random.Random, axis_size: int) -> Placement:
    shape = meta.shape_at(1)
    dims = [d for d in range(len(shape)) if divides(Shard(d), shape, axis_size)]
    return rng.choice([Replicate(), *(Shard(d) for d in dims)])


def _anywhere(meta: TensorMeta, rng: random.Random, axis_size: int) -> Placement:
    if meta.dtype.startswith("float") and rng.random() < 0.2:
        return Partial()
    return _shard(meta, rng, axis_size)
