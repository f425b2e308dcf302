"""The units that a stage's parameters are sharded in under ZeRO, a block each as in FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from costmodel.memory.exact.stage.blocks import StageBlocks
from costmodel.memory.exact.stage.placed_block import BlockKind
from planner.plan import Plan


class Unit(NamedTuple):
    """Parameters gathered together."""

    gathered_bytes: int
    """All of them, padded to equal shards."""
    gradient_bytes: int
    """Their gradients as autograd makes them."""
    sum_bytes: int
    """Their gradients as they are summed: fp32 in bf16."""
    message_bytes: int
    """The reduce-scatter's message: the sums, padded."""
    has_input_gradient: bool
    """Whether an input of their block needs a gradient; if not, they are reduced when the whole
    backward is over."""
    last_part: Fraction
    """The last parameter's part of the gradients."""


@dataclass(frozen=True, kw_only=True)
class ShardedStage:
    """The units of a stage."""

    blocks: Sequence[Unit | None]
    """The unit of each block, None where a block has no parameters of its own."""
    shared: Unit | None
    """The unit of the parameters that several blocks share."""
    zero_stage: int
    """1, 2 or 3."""
    replicas: int
    """Ranks among which units are sharded."""
    shards_on_host: bool
    """Whether gradients' shards leave the device."""
    copies_to_reduce: bool
    """Whether a reduce-scatter sums in a copy of its message, as gloo does."""

    @property
    def shard_bytes(self) -> int:
        """A rank's shards, in the dtype that gradients are summed in."""
        return sum(unit.message_bytes // self.replicas for unit in self.units.values())

    @cached_property
    def units(self) -> Mapping[int, Unit]:
        """The units there are, by block position; the shared one by the number of blocks."""
        every = enumerate([*self.blocks, self.shared])
        return {index: unit for index, unit in every if unit is not None}

    @cached_property
    def ran_before(self) -> Mapping[int, int]:
        """The unit that ran before each; before the first, the last one of another forward."""
        order = list(self.units)
        return dict(zip(order, [*order[-1:], *order[:-1]], strict=True))

    @cached_property
    def simulated(self) -> dict[tuple, Any]:
        """Jobs simulated so far (`fsdp_walk.SimulatedJob`), by job, state before it and options."""
        return {}

    @property
    def keeps_sums(self) -> bool:
        """Whether autograd adds to gradients that are there."""
        units = self.units.values()
        return self.zero_stage == 1 and all(u.sum_bytes == u.gradient_bytes for u in units)


def sharded_stage(walk: StageBlocks, replicas: int, plan: Plan, device_type: str) -> ShardedStage:
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
            unit = _unit(
                sizes.values(), replicas, walk.gradient_factor, has_input_gradient=is_early
            )
            if not others:
                known[kind] = unit
        else:
            unit = known[kind]
        blocks.append(unit)
    return ShardedStage(
        blocks=tuple(blocks),
        shared=_unit(shared.values(), replicas, walk.gradient_factor, has_input_gradient=True),
        zero_stage=plan.zero_stage,
        replicas=replicas,
        shards_on_host=plan.optimizer_on_host,
        copies_to_reduce=device_type == "cpu",
    )


def _unit(
    params: Iterable[tuple[int, int]],
    replicas: int,
    gradient_factor: int,
    *,
    has_input_gradient: bool,
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
        sum_bytes=gradient_factor * whole,
        message_bytes=gradient_factor * padded,
        has_input_gradient=has_input_gradient,
        last_part=Fraction(last, whole),
    )
