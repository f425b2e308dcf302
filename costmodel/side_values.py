"""Values that no block makes: those made of the batch for each microbatch, and those made once.

The preamble makes both. A value that depends on no batch input (positions, a causal mask) is made
once for each number of samples and kept (`planner.runtime.step.feed`). Many are views: a mask
that is expanded over the samples takes no more than the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.links import Links
from costmodel.memory.saved import HELD_ANYWAY, Storage, map_storages
from planner.graph import ModelGraph
from planner.layout.placements import Placements
from planner.plan import Plan
from planner.runtime.step.wiring import block_placements


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
        return sum(found.num_bytes for found in storages if found.kind not in HELD_ANYWAY)


def find_side_values(graph: ModelGraph, microbatch_size: int) -> SideValues:
    """Return the preamble's values for microbatches of some samples."""
    program = graph.preamble.bind(microbatch_size)
    storages = map_storages(program).storage
    return SideValues(
        storage={name: storages[name] for name in program.outputs},
        fixed=frozenset(name for name in program.outputs if not program.only((name,)).inputs),
    )


def frozen_bytes(
    plan: Plan, graph: ModelGraph, links: Links, pp_rank: int, values: SideValues
) -> int:
    """Bytes that a rank has all the time and does not train: buffers, constants, frozen
    parameters, and those of the side `values` that are made once.
    """
    mine = [index for index, stage in enumerate(plan.stages) if stage.pp_rank == pp_rank]
    given: set[frozenset[str]] = set()
    placed: dict[str, Placements] = {}
    for stage in mine:
        for index in plan.stages[stage].blocks:
            given.add(links.given[index])
            if links.untrained[index]:
                names = graph.blocks[index].params
                _, params, _ = block_placements(graph, plan, index, stage)
                for at in links.untrained[index]:
                    placed.setdefault(names[at], params[at])
    degrees = plan.stage_degrees(mine[0])
    total = sum(
        graph.tensor[name].bytes_at(1) // placements.parts(degrees)
        for name, placements in placed.items()
    )
    return total + values.num_bytes(frozenset().union(*given), fixed=True)
