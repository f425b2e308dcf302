"""The units that a stage's parameters are sharded in under ZeRO, a block each as in FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from costmodel.memory.block.placed_block import PlacedBlock
from planner.language.layout.sharing import shard_dim
from planner.language.plan.replication import Replication


class Unit(NamedTuple):
    """Parameters gathered together."""

    gathered_bytes: int
    """All of them, padded to equal shards; under ZeRO 3 frozen ones, too."""
    gradient_bytes: int
    """Gradients of the trained ones as autograd makes them; 0 where all are frozen."""
    sum_bytes: int
    """Their gradients as they are summed: fp32 in bf16."""
    message_bytes: int
    """The reduce-scatter's message: the sums, padded."""
    shard_bytes: int
    """A rank's shard of that."""
    own_bytes: int
    """A rank's shard of the trained parameters themselves."""
    frozen_shard_bytes: int
    """A rank's shard of the frozen ones."""
    has_backward: bool
    """Whether a gradient arrives at their block at all."""
    has_input_gradient: bool
    """Whether an input of their block needs a gradient; if not, they are reduced when the whole
    backward is over."""
    last_part: Fraction
    """Part of the gradients that stay until their sum is there: the last parameter's, and that of
    the last one whose shards are not of its first dim."""
    alone_bytes: int = 0
    """Part of `own_bytes` in whole parameters, which no ranks share shards of."""
    turned_bytes: int = 0
    """Parameters whose shards are not of their first dim: they are gathered by way of a copy."""
    turned_part: Fraction = Fraction(0)
    """The part of the gradients of the last of them, which stays beside the copy it is summed
    from."""


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
    sums_stay: bool = False
    """Whether whole sums are there from the start of a step to its end, and are summed in place."""
    adds_late: bool = False
    """Whether whole gradients stay until a backward has ended, and are added to sums then."""

    @property
    def own_bytes(self) -> int:
        """A rank's shards of trained parameters, in their own dtype."""
        return sum(unit.own_bytes for unit in self.units.values())

    @property
    def alone_bytes(self) -> int:
        """Part of that in whole parameters, which no ranks share shards of."""
        return sum(unit.alone_bytes for unit in self.units.values())

    @property
    def frozen_shard_bytes(self) -> int:
        """A rank's shards of frozen parameters."""
        return sum(unit.frozen_shard_bytes for unit in self.units.values())

    @cached_property
    def ran_before(self) -> Mapping[int, int]:
        """The unit that each one's backward fetches: the one that ran before; of the first, the
        last one of another forward, or under ZeRO 3 itself, as the runtime names them there.
        """
        order = list(self.units)
        ahead_of_first = order[:1] if self.zero_stage == 3 else order[-1:]
        return dict(zip(order, [*ahead_of_first, *order[:-1]], strict=True))

    @cached_property
    def simulated(self) -> dict[tuple, Any]:
        """Jobs simulated so far (`fsdp_walk.ShardedBytes`), by job, state before it and options."""
        return {}

    @property
    def keeps_sums(self) -> bool:
        """Whether autograd adds to gradients that are there."""
        units = self.units.values()
        return self.zero_stage == 1 and all(u.sum_bytes == u.gradient_bytes for u in units)


def sharded_stage(
    blocks: Sequence[PlacedBlock],
    shared_by_block: Sequence[Collection[str]],
    replication: Replication,
    *,
    gradient_factor: int,
    device_type: str,
    sums_stay: bool = False,
    adds_late: bool = False,
    shards_tensors: bool = True,
) -> ShardedStage:
    """Return the units of a stage; parameters that several of its blocks use (`shared_by_block`)
    are in one of their own. Frozen ones are in units under ZeRO 3 only. Without `shards_tensors`
    each is cut anywhere (`Execution.shards_tensors`).
    """

    def sized(num_bytes: int, shape: tuple[int, ...], shards: int) -> Sized:
        if not shards_tensors:
            return Sized(num_bytes, -(-num_bytes // shards) * shards, shards)
        if not shape:  # a number is whole on every rank
            return Sized(num_bytes, num_bytes, 1)
        dim = shard_dim(shape, shards)
        # A dim is cut into equal parts, the last of which may be padding.
        padded = num_bytes // max(shape[dim], 1) * (-(-shape[dim] // shards) * shards)
        return Sized(num_bytes, padded, shards, is_turned=dim > 0)

    parts, of_experts = replication.shards, replication.of_experts.shards
    shared: dict[str, Sized] = {}
    shared_frozen: dict[str, Sized] = {}
    # `shared_by_block` names trained parameters only; a frozen parameter is shared by its users.
    users = Counter(name for block in blocks for name in block.frozen.values())
    units: dict[int, Unit] = {}
    for index, (block, of_others) in enumerate(zip(blocks, shared_by_block, strict=True)):
        kind = block.kind
        # Experts on a mesh of their own have fewer replicas, and so fewer shards.
        shards = {n: of_experts if n in kind.bytes.spread else parts for n in block.params}
        sizes = {
            n: sized(kind.bytes.params[n], kind.bytes.param_shapes[n], shards[n])
            for n in block.params
        }
        shared |= {block.params[local]: sizes[local] for local in sizes if local in of_others}
        own = [size for local, size in sizes.items() if local not in of_others]
        own_frozen: list[Sized] = []
        # ZeRO 1 and 2 leave frozen parameters whole: `resident.frozen` counts them.
        for local, name in block.frozen.items() if replication.zero_stage == 3 else ():
            size = sized(kind.bytes.frozen[local], kind.bytes.param_shapes[local], parts)
            if users[name] > 1:
                shared_frozen[name] = size
            else:
                own_frozen.append(size)
        if own or own_frozen:
            units[index] = _unit(
                own,
                own_frozen,
                gradient_factor,
                has_backward=any(edge.requires_grad for edge in kind.bytes.outputs),
                has_input_gradient=bool(of_others)
                or any(edge.requires_grad for edge in kind.bytes.inputs),
            )
    if shared or shared_frozen:
        units[len(blocks)] = _unit(
            list(shared.values()),
            list(shared_frozen.values()),
            gradient_factor,
            has_backward=True,
            has_input_gradient=True,
        )
    return ShardedStage(
        units=units,
        shared=len(blocks),
        zero_stage=replication.zero_stage,
        shards_on_host=replication.optimizer_on_host,
        copies_to_reduce=device_type == "cpu",
        sums_stay=sums_stay,
        adds_late=adds_late,
    )


class Sized(NamedTuple):
    """A parameter in shards."""

    num_bytes: int
    """All of it."""
    padded_bytes: int
    """Its shards together, filled up to equal ones."""
    shards: int
    """How many they are."""
    is_turned: bool = False
    """Whether they are not of its first dim, so that FSDP2 copies it between a message and
    memory."""


def _unit(
    trained: Sequence[Sized],
    frozen: Sequence[Sized],
    gradient_factor: int,
    *,
    has_backward: bool,
    has_input_gradient: bool,
) -> Unit:
    """Return the unit of parameters of such sizes.

    What has one shard is whole: nothing is gathered or sent of it, and its gradient stays where
    the backward makes it.
    """
    own, own_frozen = (
        sum(param.padded_bytes // param.shards for param in params) for params in (trained, frozen)
    )
    alone = sum(param.num_bytes for param in trained if param.shards == 1)
    trained = [param for param in trained if param.shards > 1]
    whole = sum(param.num_bytes for param in trained)
    padded = sum(param.padded_bytes for param in trained)
    last_turned = [param for param in trained if param.is_turned][-1:]
    stay = [*last_turned, *(param for param in trained[-1:] if not param.is_turned)]
    return Unit(
        gathered_bytes=padded + sum(param.padded_bytes for param in frozen),
        gradient_bytes=whole,
        sum_bytes=gradient_factor * (whole + alone),
        message_bytes=gradient_factor * padded,
        shard_bytes=gradient_factor * own,
        own_bytes=own,
        alone_bytes=alone,
        frozen_shard_bytes=own_frozen,
        has_backward=has_backward,
        has_input_gradient=has_input_gradient,
        last_part=Fraction(sum(param.num_bytes for param in stay), max(whole, 1)),
        turned_bytes=sum(param.num_bytes for param in (*trained, *frozen) if param.is_turned),
        turned_part=Fraction(sum(param.num_bytes for param in last_turned), max(whole, 1)),
    )
