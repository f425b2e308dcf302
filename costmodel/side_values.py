"""Values that no block makes: those made of the batch for each microbatch, and those made once.

The preamble makes both. A value that depends on no batch input (positions, a causal mask) is made
once for each number of samples and kept (`planner.runtime.feed`). Many are views: a mask
that is expanded over the samples takes no more than the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.saved import HELD_ANYWAY
from costmodel.storage import Storage, map_storages
from planner.graph import ModelGraph
from planner.placement import Shard
from planner.plan import Plan
from planner.runtime.wiring import param_placements


@dataclass(frozen=True, kw_only=True)
class SideValues:
    """The memory that each preamble value of a microbatch lies in, and which are `fixed`."""

    storage: Mapping[str, Storage]
    fixed: frozenset[str]

    def num_bytes(self, names: Iterable[str], *, fixed: bool) -> int:
        """Bytes of those of some values that are fixed, or that are not, each storage once."""
        storages = {
            self.storage[name] for name in names
            if name in self.storage and (name in self.fixed) is fixed
        }  # fmt: skip
        return sum(one.num_bytes for one in storages if one.kind not in HELD_ANYWAY)


def find_side_values(graph: ModelGraph, microbatch_size: int) -> SideValues:
    """Return the preamble's values for microbatches of some samples."""
    program = graph.preamble.bind(microbatch_size)
    storages = map_storages(program).storage
    return SideValues(
        storage={name: storages[name] for name in program.outputs},
        fixed=frozenset(name for name in program.outputs if not program.only((name,)).inputs),
    )


def frozen_bytes(plan: Plan, graph: ModelGraph, pp_rank: int, values: SideValues) -> int:
    """Bytes that a rank has all the time and does not train: buffers, constants, frozen
    parameters, and those of the side `values` that are made once.
    """
    mine = [index for index, stage in enumerate(plan.stages) if stage.pp_rank == pp_rank]
    tp, total = plan.stage_tp(mine[0]), 0
    for name, placed in param_placements(graph, plan, pp_rank).items():
        meta = graph.tensor[name]
        if meta.kind != "param" or not meta.requires_grad:
            total += meta.bytes_at(1) // (tp if isinstance(placed, Shard) else 1)
    blocks = [graph.blocks[index] for stage in mine for index in plan.stages[stage].blocks]
    return total + values.num_bytes({n for b in blocks for n in b.inputs}, fixed=True)
