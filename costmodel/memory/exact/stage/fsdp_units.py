"""The units that a stage's parameters are sharded in under ZeRO, a block each as in FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from costmodel.memory.exact.stage.placed_block import BlockKind
from costmodel.memory.exact.stage.stage_walk import StageWalk
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
    shard_bytes: int
    """A rank's shard of that."""
    has_input_gradient: bool
    """Whether an input of their block needs a gradient; if not, they are reduced when the whole
    backward is over."""
    last_part: Fraction
    """The last parameter's part of the gradients."""


@dataclass(frozen=True, kw_only=True)
class ShardedStage:
    """The units of a stage."""

    units: Mapping[int, Unit]
    """By position of their block, without blocks that have no parameters of their own; the unit of
    parameters that several blocks share comes last, at `shared`."""
    shared: int
    """The number of blocks."""
    zero_stage: int
    """1, 2 or 3."""
    shards_on_host: bool
    """Whether gradients' shards leave the device."""
    copies_to_reduce: bool
    """Whether a reduce-scatter sums in a copy of its message, as gloo does."""

    @property
    def shard_bytes(self) -> int:
        """A rank's shards, in the dtype that gradients are summed in."""
        return sum(unit.shard_bytes for unit in self.units.values())

    @cached_property
    def ran_before(self) -> Mapping[int, int]:
        """The unit that ran before each; before the first, the last one of another forward."""
        order = list(self.units)
        return dict(zip(order, [*order[-1:], *order[:-1]], strict=True))

    @cached_property
    def simulated(self) -> dict[tuple, Any]:
        """Jobs simulated so far (`fsdp_walk.ShardedBytes`), by job, state before it and options."""
        return {}

    @property
    def keeps_sums(self) -> bool:
        """Whether autograd adds to gradients that are there."""
        units = self.units.values()
        return self.zero_stage == 1 and all(u.sum_bytes == u.gradient_bytes for u in units)


def sharded_stage(walk: StageWalk, replicas: int, plan: Plan, device_type: str) -> ShardedStage:
    """Return the units of a stage; parameters that several of its blocks use are in one of their
    own.
    """
    shared: dict[str, tuple[int, int]] = {}
    units: dict[int, Unit] = {}
    # Blocks that differ in names only have equal units, where nobody uses parameters of theirs.
    known: dict[BlockKind, Unit] = {}
    for index, block in enumerate(walk.blocks):
        kind, of_others = block.kind, walk.shared[index]
        sizes = {n: (kind.bytes.params[n], kind.bytes.param_rows[n]) for n in block.params}
        shared |= {block.params[local]: sizes[local] for local in sizes if local in of_others}
        own = [size for local, size in sizes.items() if local not in of_others]
        if kind in known and not of_others:
            units[index] = known[kind]
        elif own:
            is_early = bool(of_others) or any(edge.requires_grad for edge in kind.bytes.inputs)
            unit = _unit(own, replicas, walk.gradient_factor, has_input_gradient=is_early)
            units[index] = unit
            if not of_others:
                known[kind] = unit
    if shared:
        units[len(walk.blocks)] = _unit(
            list(shared.values()), replicas, walk.gradient_factor, has_input_gradient=True
        )
    return ShardedStage(
        units=units,
        shared=len(walk.blocks),
        zero_stage=plan.zero_stage,
        shards_on_host=plan.optimizer_on_host,
        copies_to_reduce=device_type == "cpu",
    )


def _unit(
    params: Sequence[tuple[int, int]],
    replicas: int,
    gradient_factor: int,
    *,
    has_input_gradient: bool,
) -> Unit:
    """Return the unit of parameters of such (bytes, lengths of their first dims)."""
    whole = sum(size for size, _ in params)
    # A dim is cut into equal parts, the last of which may be padding.
    padded = sum(size // max(rows, 1) * -(-rows // replicas) * replicas for size, rows in params)
    last, _ = params[-1]
    return Unit(
        gathered_bytes=padded,
        gradient_bytes=whole,
        sum_bytes=gradient_factor * whole,
        message_bytes=gradient_factor * padded,
        shard_bytes=gradient_factor * padded // replicas,
        has_input_gradient=has_input_gradient,
        last_part=Fraction(last, whole),
    )
