"""The units that a stage's parameters are sharded in under ZeRO, a block each as in FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from costmodel.memory.exact.fsdp_walk import ShardedStage, Unit
from costmodel.memory.exact.placed_block import BlockKind
from costmodel.memory.exact.stage_walk import StageWalk
from planner.plan import Plan


def sharded_stage(walk: StageWalk, replicas: int, plan: Plan, device_type: str) -> ShardedStage:
    """Return the units of a stage; parameters that several of its blocks use are in one of their
    own.
    """
    shared: dict[str, tuple[int, int]] = {}
    blocks: list[Unit | None] = []
    # Blocks that differ in names only have equal units, where nobody uses parameters of theirs.
    known: dict[BlockKind, Unit | None] = {}
    for block in walk.blocks:
        kind, held = block.kind, block.kind.bytes
        others = {name for name in block.params.values() if walk.is_shared(name)}
        shared |= {
            name: (held.params[local], held.param_rows[local])
            for local, name in block.params.items()
            if name in others
        }
        if others or kind not in known:
            sizes = {
                name: (held.params[local], held.param_rows[local])
                for local, name in block.params.items()
                if name not in others
            }
            is_early = bool(others) or any(edge.requires_grad for edge in held.inputs)
            unit = _unit(sizes.values(), replicas, walk.wide, has_input_gradient=is_early)
            if not others:
                known[kind] = unit
        else:
            unit = known[kind]
        blocks.append(unit)
    return ShardedStage(
        blocks=tuple(blocks),
        shared=_unit(shared.values(), replicas, walk.wide, has_input_gradient=True),
        zero_stage=plan.zero_stage,
        replicas=replicas,
        shards_on_host=plan.optimizer_on_host,
        copies_to_reduce=device_type == "cpu",
    )


def _unit(
    params: Iterable[tuple[int, int]], replicas: int, wide: int, *, has_input_gradient: bool
) -> Unit | None:
    """Return the unit of parameters of such bytes and lengths of their first dims, if any."""
    sizes = list(params)
    if not sizes:
        return None
    whole = sum(size for size, _ in sizes)
    # A dim is cut into equal parts, the last of which may be padding.
    padded = sum(size // max(rows, 1) * -(-rows // replicas) * replicas for size, rows in sizes)
    last, _ = sizes[-1]
    return Unit(
        gathered_bytes=padded,
        gradient_bytes=whole,
        sum_bytes=wide * whole,
        message_bytes=wide * padded,
        has_input_gradient=has_input_gradient,
        last_part=Fraction(last, whole),
    )
