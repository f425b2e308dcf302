"""Stages that share a parameter: seconds and bytes of summing its gradients, once a step.

A tied embedding of the first and the last stage has a copy on each; after the last backward the
ranks that hold the same piece add up their sums (`planner.runtime.state.gradients.tied`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from costmodel.cache import CostCache
from costmodel.time.stage_costs.stage_costs import StageCosts
from costmodel.topology import pair_group, ranks_of_stage, way_out
from planner.language.graph import ModelGraph
from planner.language.layout.placements import Placements
from planner.language.lowering.wiring import block_placements, param_placements
from planner.language.plan import Plan
from profiles import Profile

COPIES = 8
"""Bytes that cross memory for each byte of a gradient: a sum of copies is made, laid beside
others in one message, and written back."""


def tied_seconds(
    of_ranks: Sequence[CostCache],
    stages: Sequence[StageCosts],
    homes: Sequence[int],
    *,
    num_ranks: int,
) -> tuple[float, ...]:
    """Return what each pp rank spends on it: `of_ranks` has the prices on its devices, `stages` for
    each stage the costs of all stages under its mesh, `homes` its pp rank; a stage has `num_ranks`.

    From user to user along the model: a parameter on k ranks takes a chain of k - 1 exchanges.
    """
    spent, firsts = [0.0] * len(of_ranks), stages[0].runs.start.tolist()
    for stage, costs in enumerate(stages):
        for before, user, size in costs.runs.chain.ties:
            first, second = homes[bisect_right(firsts, before) - 1], homes[stage]
            if bisect_right(firsts, user) - 1 != stage or first == second:
                continue
            is_apart = of_ranks[first] is not of_ranks[second]
            # Both ranks wait for the exchange.
            for rank in (first, second):
                apart = abs(second - first) * ranks_of_stage(of_ranks[rank].cluster, num_ranks)
                spent[rank] += tied_pair_seconds(
                    of_ranks[rank].profile,
                    num_bytes=costs.replication.gradient_bytes(size),
                    ranks_apart=None if is_apart else apart,
                )
    return tuple(spent)


def tied_pair_seconds(profile: Profile, *, num_bytes: float, ranks_apart: int | None) -> float:
    """Return the sum over two ranks of a gradient of so many local bytes; None: of a rank in
    another group of devices.
    """
    # Two ranks share a node up to its size apart, whether or not that divides it.
    cluster = profile.cluster
    group = way_out(cluster) if ranks_apart is None else pair_group(cluster, apart=ranks_apart)
    message = profile.collective_seconds("all_reduce", num_bytes, group).seconds
    return message + COPIES * num_bytes / profile.cluster.memory_bytes_per_s


def tied_stages(plan: Plan, graph: ModelGraph) -> dict[str, list[int]]:
    """Return the stages that use each trained parameter of several stages."""
    firsts = [stage.first_block for stage in plan.stages]
    found = {}
    for name in _trained(graph):
        users = graph.shared_params[name]
        stages = list(dict.fromkeys(bisect_right(firsts, index) - 1 for index in users))
        if len(stages) > 1:
            found[name] = stages
    return found


def tied_sum_bytes(
    plan: Plan, graph: ModelGraph, tied: Mapping[str, Sequence[int]], pp_rank: int
) -> int:
    """Bytes that a rank needs beside the gradients of copies on several stages, as given by
    `tied_stages`, to sum those: their sum here, and the message that goes round.
    """
    total = 0
    for name, stages in tied.items():
        here = [stage for stage in stages if plan.stages[stage].pp_rank == pp_rank]
        if not here:
            continue
        stage = here[0]
        block = next(i for i in graph.shared_params[name] if i in plan.stages[stage].blocks)
        _, params, _ = block_placements(graph, plan, block, stage)
        placed = params[graph.blocks[block].params.index(name)]
        size = graph.tensor[name].bytes_at(1) // placed.parts(plan.stage_degrees(stage))
        # Copies on this rank alone need no message: only their sum is made beside them.
        total += size * (1 if len(here) == len(stages) else 2)
    return total


def check_copies(plan: Plan, graph: ModelGraph) -> None:
    """Raise LayoutError where blocks of one pp rank that share a parameter place it differently."""
    firsts = [stage.first_block for stage in plan.stages]
    for name, users in graph.shared_params.items():
        found: dict[int, Placements] = {}
        for index in users:
            stage = bisect_right(firsts, index) - 1
            _, params, _ = block_placements(graph, plan, index, stage)
            placed = params[graph.blocks[index].params.index(name)]
            rank = plan.stages[stage].pp_rank
            if found.setdefault(rank, placed) != placed:
                param_placements(graph, plan, rank)  # raises


def _trained(graph: ModelGraph) -> list[str]:
    """The trained parameters of several blocks."""
    metas = [graph.tensor[name] for name in graph.shared_params]
    trained = (meta for meta in metas if meta.kind == "param" and meta.requires_grad)
    return [meta.name for meta in trained if not meta.table]  # (which exchanges rows)
