"""What a rank holds through the whole step, and in the optimizer's step, whatever its job table.

The parts are those of `costmodel.memory.part_table`; here are the amounts that they take of a rank
of a plan: each block's parameters padded to equal shards where ZeRO has them, and what the host
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from costmodel.cache import CostCache
from costmodel.execution.saves import NARROW
from costmodel.memory.exact.stage.jobs import StageJobs
from costmodel.memory.exact.workspaces import workspace_bytes
from costmodel.memory.part_table import PARTS, Phase, State, gradients, update_scratch
from costmodel.memory.parts import ADAMW_STATES, COUNTER_BYTES, Ranks
from costmodel.time.offload import HOST_BUCKET_BYTES
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.tied import tied_sum_bytes
from planner.language.graph.tables import tables_of
from planner.language.layout.placements import Placements
from planner.language.lowering.wiring import block_placements
from planner.language.plan import Plan
from planner.language.plan.replication import Replication
from planner.units import DTYPE_BYTES
from profiles.profile import Amount


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank of a plan, as far as what it holds does not depend on the order of its jobs."""

    plan: Plan
    """The plan."""
    costs: CostCache
    """Graph, profile, and what blocks cost."""
    pp_rank: int
    """The pp rank; its dp, cp and tp ranks hold the same."""
    stages: Mapping[int, StageJobs]
    """Its stages, by index."""
    weights: StageLoad
    """The load of all its stages together: parameters of several stages count once."""
    tied: Mapping[str, Sequence[int]]
    """Stages of each parameter that stages of several ranks share."""

    @cached_property
    def ranks(self) -> Ranks:
        """How its ranks keep parameters, gradients and optimizer state."""
        replication = Replication.of(self.plan, min(self.stages))
        return Ranks.under(replication, self.costs.execution, self.costs.profile)

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of the trained parameters, or shards of them, that the rank updates."""
        if not self.ranks.is_sharded:
            return int(self.weights.param_bytes)
        shards = (stage.sharded for stage in self.stages.values())
        return sum(shard.own_bytes for shard in shards if shard is not None)

    @cached_property
    def state(self) -> State:
        """Bytes of each kind of state."""
        alone = sum(stage.sharded.alone_bytes for stage in self.stages.values() if stage.sharded)
        return State(
            trained=int(self.weights.param_bytes) - alone,
            alone=alone,
            own=self.own_bytes,
            frozen=_frozen_bytes(self),
            own_frozen=self.frozen_shard_bytes,
            step_counts=COUNTER_BYTES * int(self.weights.num_params),
            table_states=sum(_states_bytes(table) for table in self.device_tables),
            # Before a table's are more than the table has rows, each is added up.
            table_rows=sum(min(t.rows, t.looked_up) * t.row_bytes for t in self.device_tables),
            batch=_batch_bytes(self) + _mask_bytes(self),
            workspaces=workspace_bytes(
                self.costs, [block for stage in self.stages.values() for block in stage.walk.blocks]
            ),
        )

    @cached_property
    def device_tables(self) -> tuple[HeldTable, ...]:
        """Tables with a gradient of rows that the device has."""
        return tuple(table for table in held_tables(self) if not table.on_host)

    @property
    def summed_bytes(self) -> int:
        """Bytes of the sums of its gradients."""
        whole = self.ranks.has_buckets
        return self.ranks.sum_factor * (int(self.weights.param_bytes) if whole else self.own_bytes)

    @cached_property
    def frozen_shard_bytes(self) -> int:
        """Bytes of its shards of frozen parameters."""
        shards = (stage.sharded for stage in self.stages.values())
        return sum(shard.frozen_shard_bytes for shard in shards if shard is not None)

    @cached_property
    def update_bytes(self) -> int:
        """The optimizer's step: gradients, and what is allocated beside them."""
        ranks, state = self.ranks, self.state
        # Before it, ranks that share parameters sum the gradients of these. The two do not overlap
        # in time, so the larger counts.
        scratch = int(update_scratch(ranks, Phase.UPDATE).of(state))
        sums = tied_sum_bytes(self.plan, self.costs.graph, self.tied, self.pp_rank)
        sums = sums * ranks.sum_factor // ranks.shards
        rows = sum(_update_rows_bytes(self, table) for table in self.device_tables)
        # The step's gradients of rows are resident already: only more than these counts.
        more_rows = max(0, rows - int(state.table_rows))
        return max(scratch, sums) + int(gradients(ranks, Phase.UPDATE).of(state)) + more_rows


def _frozen_bytes(rank: RankState) -> int:
    """Return what is whole of frozen parameters, buffers, constants, and values that the preamble
    makes once.
    """
    plan, costs, first = rank.plan, rank.costs, min(rank.stages)
    given: set[frozenset[str]] = set()
    placed: dict[str, Placements] = {}
    narrow: set[str] = set()
    for s in rank.stages:
        for index in plan.stages[s].blocks:
            given.add(costs.links.given[index])
            if untrained := costs.links.untrained[index]:
                names = costs.graph.blocks[index].params
                lies_narrow = costs.narrow_params(costs.graph.blocks[index].class_index)
                narrow |= {names[at] for at in lies_narrow}
                _, params, _ = block_placements(costs.graph, plan, index, s)
                for at in untrained:
                    meta = costs.graph.tensor[names[at]]
                    # (A table with a gradient of rows is trained, and whole on each replica.)
                    if meta.table or not (rank.ranks.shards_frozen and meta.kind == "param"):
                        # By name, so that a tensor of several blocks of the rank counts once.
                        placed.setdefault(names[at], params[at])
    degrees = plan.stage_degrees(first)

    def whole_bytes(name: str) -> int:
        meta = costs.graph.tensor[name]
        return (replace(meta, dtype=NARROW) if name in narrow else meta).bytes_at(1)

    total = sum(
        whole_bytes(name) // placements.parts(degrees) for name, placements in placed.items()
    )
    # What the preamble makes once for all microbatches; what it makes for each is an activation.
    side_values = costs.side_values(plan.stage_microbatch_size(first))
    return total + side_values.num_bytes(frozenset().union(*given), fixed=True)


def _batch_bytes(rank: RankState) -> int:
    graph, plan = rank.costs.graph, rank.plan
    # What a runtime gives every rank whole grows with the replicas: 4 GiB on 4,096 of them.
    is_whole = rank.costs.execution.whole_batch
    units = plan.global_units if is_whole else plan.stage_microbatch_size(min(rank.stages))
    return sum(graph.tensor[name].bytes_at(units) for name in graph.batch_inputs)


def _mask_bytes(rank: RankState) -> int:
    """Return the bytes of a microbatch's mask, of which cp ranks have the rows of their own."""
    graph, plan = rank.costs.graph, rank.plan
    first, last = 0, len(graph.blocks) - 1
    has_ends = any({first, last} & {*plan.stages[s].blocks} for s in rank.stages)
    if not (rank.costs.execution.masks_batch and has_ends):
        return 0
    stage = min(rank.stages)
    samples, positions = graph.tensor[graph.batch_inputs[0]].shape_at(
        plan.stage_microbatch_size(stage)
    )
    return samples * positions**2 // plan.stage_degrees(stage)["cp"]


def _host_bytes(rank: RankState) -> Amount:
    """Return what a rank keeps on the host: what no stage has, and what an optimizer there has: its
    state, and what it steps on.

    Tables are there with two moments, and a step's gradients of rows with what adds them up.
    Without ZeRO the host has AdamW's state, a copy of the weights, and slots for two buckets of
    gradients and two of weights on their way (`planner.runtime.state.optimizers.host_optimizer`).
    A bucket is at least as large as the largest tensor, for which the largest block stands. With
    ZeRO it has shards of the state, the weights and the gradients.
    """
    kept = rank.costs.graph.outside_bytes + _tables_on_host(rank)
    if not rank.plan.optimizer_on_host:
        return kept
    load, ranks, factor = rank.weights, rank.ranks, rank.ranks.gradient_factor
    counters = COUNTER_BYTES * load.num_params
    if ranks.is_sharded:
        experts = load.spread_bytes
        shard = (load.param_bytes - experts) / ranks.shards + experts / ranks.of_experts.shards
        # A shard's two moments, its weights and its gradients.
        trained = (ADAMW_STATES + 2) * (factor * shard) + counters
        return kept + trained + rank.frozen_shard_bytes
    stepped = factor * load.param_bytes
    # A bucket holds a whole tensor at least. Its gradients are as wide as sums, its weights
    # 1/factor of that; a model smaller than the slots fills no more than itself.
    bucket = np.maximum(HOST_BUCKET_BYTES, factor * load.largest_param_bytes)
    buckets = np.minimum(_HOST_SLOTS * bucket, stepped)
    return kept + (ADAMW_STATES + 1) * stepped + counters + buckets * (1 + 1 / factor)


class HeldTable(NamedTuple):
    """A table with a gradient of rows, as a rank has it."""

    on_host: bool
    """Whether the host has it."""
    weight_bytes: int
    """Bytes of its rows, or the rank's columns of them, as blocks read them."""
    stepped_bytes: int
    """Bytes of what the optimizer steps on."""
    row_bytes: int
    """Bytes of a row's gradient, with its number."""
    rows: int
    """Rows of the table."""
    looked_up: int
    """Rows that the rank looks up in a step, each as often as it is."""


def held_tables(rank: RankState) -> Iterator[HeldTable]:
    """Yield the tables with a gradient of rows of a rank's stages."""
    graph, plan = rank.costs.graph, rank.plan
    every = rank.costs.once("tables", lambda: tables_of(graph))
    by_rows = {table.name: table for table in every if graph.tensor[table.name].table}
    if not by_rows:
        return
    placed: dict[str, Placements] = {}
    for s in rank.stages:
        for index in plan.stages[s].blocks:
            names = graph.blocks[index].params
            if not by_rows.keys().isdisjoint(names):
                _, params, _ = block_placements(graph, plan, index, s)
                placed |= dict(zip(names, params, strict=True))
    first = min(rank.stages)
    # Gradients of rows are collected over all microbatches of the step.
    samples = plan.stage_microbatch_size(first) * plan.num_microbatches
    for table in by_rows.values():
        meta = graph.tensor[table.name]
        if table.name in placed:
            width = table.width // placed[table.name].parts(plan.stage_degrees(first))
            row = width * DTYPE_BYTES[meta.dtype]
            stepped = row * rank.ranks.gradient_factor
            yield HeldTable(
                on_host=meta.on_host,
                weight_bytes=table.rows * row,
                stepped_bytes=table.rows * stepped,
                row_bytes=stepped + _NUMBER_BYTES,
                rows=table.rows,
                looked_up=table.per_sample * samples,
            )


def _tables_on_host(rank: RankState) -> int:
    return sum(
        (1 + ADAMW_STATES) * table.stepped_bytes + COUNTER_BYTES + _update_rows_bytes(rank, table)
        for table in held_tables(rank)
        if table.on_host
    )


def _update_rows_bytes(rank: RankState, table: HeldTable) -> int:
    """Return what the gradients of rows that all replicas touch take while they are stepped on."""
    replicas = rank.plan.stage_degrees(min(rank.stages)).along("data")
    return _COPIES_OF_ROWS * min(table.rows, replicas * table.looked_up) * table.row_bytes


def _states_bytes(table: HeldTable) -> int:
    """Return a table's two moments and step count, and in bf16 its master."""
    # Where the optimizer steps on something wider than the weights, that is a copy of its own.
    master = table.stepped_bytes if table.stepped_bytes > table.weight_bytes else 0
    return master + ADAMW_STATES * table.stepped_bytes + COUNTER_BYTES


def resident_parts(rank: RankState) -> Counter[str]:
    """Return the bytes of all parts that are the same through the whole step, by field of
    `MemoryParts`.
    """
    found: Counter[str] = Counter()
    for part in PARTS.values():
        if not part.is_walked:
            found[part.field] += part.times(rank.ranks, Phase.BEFORE_BACKWARD).of(rank.state)
    found["host_bytes"] += _host_bytes(rank)
    return found


_HOST_SLOTS = 2
_NUMBER_BYTES, _COPIES_OF_ROWS = 8, 6
"""Of the gradients of rows that all ranks touch in a step: themselves, and what a lazy Adam makes
beside them (gathered moments, new ones, their quotient)."""
