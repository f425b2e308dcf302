"""A plan without a search: stages of equal block counts and propagated op layouts.

For trying one layout out, and for tests. `search` finds better plans.
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.graph import Affine, ModelGraph
from planner.plan import ClusterRef, ModelRef, Plan, Recompute, StagePlan, ZeroStage
from planner.schedule import stage_to_pp_rank
from planner.sharding import propagate_graph


def default_plan(
    graph: ModelGraph,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    microbatch_size: int = 1,
    num_microbatches: int | None = None,
    schedule: str = "1f1b",
    zero_stage: ZeroStage = 0,
    recompute: Recompute = "none",
    file: str = "",
) -> Plan:
    """Return a plan with these degrees; num_microbatches defaults to twice pp.

    Raises LayoutError when there are fewer blocks than stages, ScheduleError for an unknown
    schedule.
    """
    homes = stage_to_pp_rank(schedule, pp, vpp)
    num_stages, num_blocks = pp * vpp, len(graph.blocks)
    if num_blocks < num_stages:
        raise LayoutError(
            f"pp={pp} times vpp={vpp} makes {num_stages} stages and the model has {num_blocks} "
            f"blocks; use at most {num_blocks} stages"
        )
    bounds = [num_blocks * s // num_stages for s in range(num_stages + 1)]
    stages = tuple(
        StagePlan(
            pp_rank=homes[s],
            first_block=bounds[s],
            last_block=bounds[s + 1] - 1,
            recompute=recompute,
        )
        for s in range(num_stages)
    )
    return Plan(
        model=model_ref(graph, file=file),
        cluster=ClusterRef(name="none", device="cpu", devices_per_node=dp * tp * pp),
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches or max(2 * pp, 1),
        schedule=schedule,
        zero_stage=zero_stage,
        stages=stages,
        layouts=propagate_graph(graph, microbatch_size=microbatch_size, axis_size=tp)
        if tp > 1
        else (),
    )


def model_ref(graph: ModelGraph, *, file: str) -> ModelRef:
    """Return how a plan names the model of a graph."""
    return ModelRef(
        name=graph.name,
        file=file,
        fingerprint=graph.fingerprint,
        inputs=tuple(
            (
                t.fqn,
                t.dtype,
                tuple((s.per_sample, s.fixed) if isinstance(s, Affine) else s for s in t.shape),
            )
            for t in (graph.tensor[name] for name in graph.batch_inputs)
        ),
        batch_tree=graph.batch_tree,
    )
