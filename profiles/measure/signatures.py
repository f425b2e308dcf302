"""Which probes a search of given models may need: each distinct signature once.

Blocks of one class share their signatures, so a 32-layer model needs the probes of a
2-layer one. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.language.graph import ModelGraph, Op, Program, TensorMeta
from planner.language.layout.placement import Placement
from planner.language.ops.call import local_shape
from planner.language.ops.flops import op_work
from planner.language.ops.registry import local_ops, strategies
from profiles.measure.probes import BlockProbe, OpProbe, block_probe, is_measurable, probe_of

MICROBATCH_SIZES = (1, 2, 4, 8)
"""Measured for every op; other microbatch sizes are interpolated."""

# Rates only to weigh probes against each other before anything is measured.
_TYPICAL_FLOP_PER_S = 5e10
_TYPICAL_BYTES_PER_S = 1e10


def signatures(
    models: Iterable[ModelGraph],
    *,
    num_devices: int,
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES,
) -> tuple[OpProbe, ...]:
    """Return one probe per distinct signature, the heaviest first.

    Every op of every block class and of the preamble, at each microbatch size, under each
    sharding its rule offers for each tp degree that divides `num_devices`.
    """
    found: dict[tuple, OpProbe] = {}
    for graph in models:
        uses = [0] * len(graph.classes)
        for block in graph.blocks:
            uses[block.class_index] += 1
        for program, count in ((graph.preamble, 1), *zip(graph.classes, uses, strict=True)):
            for size in microbatch_sizes:
                bound = program.bind(size)
                for tp in degrees(num_devices):
                    # Of as many samples, microbatches of `size` run 1/size as often.
                    for probe in _probes_of(bound, tp, count / size):
                        known = found.get(probe.key)
                        weight = probe.weight + (known.weight if known else 0.0)
                        found[probe.key] = replace(known or probe, weight=weight)
    return tuple(sorted(found.values(), key=lambda probe: -probe.weight))


BLOCK_MICROBATCH_SIZES = (1, 4)


def blocks(models: Iterable[ModelGraph], *, compiled: bool = False) -> tuple[BlockProbe, ...]:
    """Return a probe of every block class as a whole, at two microbatch sizes, those of which most
    of a step hangs first.

    `compiled` adds a compiled one, which takes long, at the larger size.
    """
    found: dict[tuple, BlockProbe] = {}
    for graph in models:
        for index, program in enumerate(graph.classes):
            uses = sum(block.class_index == index for block in graph.blocks)
            forms = [(size, False) for size in BLOCK_MICROBATCH_SIZES]
            forms += [(BLOCK_MICROBATCH_SIZES[-1], True)] if compiled else []
            for size, through_compiler in forms:
                probe = block_probe(
                    program.bind(size), weight=float(uses), compiled=through_compiler
                )
                if probe is not None:
                    found[probe.key] = probe
    return tuple(sorted(found.values(), key=_weighed, reverse=True))


def _weighed(probe: BlockProbe) -> float:
    """Return about how many seconds of a step a block's uses take."""
    return probe.weight * sum(_typical_seconds(q.flop, q.num_bytes) for q in probe.queries)


def _typical_seconds(flop: float, num_bytes: float) -> float:
    return flop / _TYPICAL_FLOP_PER_S + num_bytes / _TYPICAL_BYTES_PER_S


def degrees(num_devices: int) -> tuple[int, ...]:
    """Return the tp degrees that divide a number of devices."""
    return tuple(d for d in range(1, num_devices + 1) if num_devices % d == 0)


def _probes_of(program: Program, tp: int, count: float) -> Iterator[OpProbe]:
    for op in program.ops:
        # Which layout a search will choose is not known yet, so every rule's shapes are measured.
        for sharding in strategies(op, program.tensor, tp):
            placements = dict(zip(op.outputs, sharding.outputs, strict=True))
            placements.update(zip(op.inputs, sharding.inputs, strict=True))
            local = _local_tensors(op, program.tensor, placements, tp)
            form = local_ops(op, sharding, program.tensor, axis="tp", axis_size=tp)
            local.update({tensor.name: tensor for tensor in form.tensors})
            for piece in form.ops:
                # The others are priced by their work.
                if not is_measurable(piece):
                    continue
                work = op_work(piece, local)
                if work.num_bytes:
                    seconds = _typical_seconds(work.flop, work.num_bytes)
                    yield probe_of(piece, local, weight=count * seconds)


def _local_tensors(
    op: Op, tensor: Mapping[str, TensorMeta], placements: Mapping[str, Placement], tp: int
) -> dict[str, TensorMeta]:
    return {
        name: replace(
            tensor[name], shape=local_shape(tensor[name].shape_at(1), placements[name], tp)
        )
        for name in (*op.inputs, *op.outputs)
    }
