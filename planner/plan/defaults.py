"""A plan without a search: stages of equal block counts and propagated op layouts.

For trying one layout out, and for tests. `search` finds better plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.context import propagate_cp
from planner.layout.lowering import lower
from planner.layout.propagate import propagate_graph
from planner.plan import (
    ClassLayout,
    ClusterRef,
    ModelRef,
    Plan,
    Recompute,
    StagePlan,
    ZeroStage,
    batch_spec,
)
from planner.schedule import DEFAULT_SCHEDULE, stage_to_pp_rank


def default_plan(
    graph: ModelGraph,
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    stage_tps: Sequence[int] = (),
    balance: Sequence[int] = (),
    microbatch_size: int = 1,
    num_microbatches: int | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    zero_stage: ZeroStage = 0,
    recompute: Recompute = "none",
    file: str = "",
) -> Plan:
    """Return a plan with these degrees; num_microbatches defaults to twice pp.

    `balance` gives the number of blocks of each stage, else they are as equal as can be.
    `stage_tps` gives each stage a tp degree of its own; its ranks, dp * tp of the plan's, are
    then cut into that and dp. Raises LayoutError when there are fewer blocks than stages,
    when the model's sequences can't be divided over cp, or when stages' degrees do not fit;
    ScheduleError for an unknown schedule.
    """
    homes = stage_to_pp_rank(schedule, pp, vpp)
    num_stages, num_blocks = pp * vpp, len(graph.blocks)
    if num_blocks < num_stages:
        raise LayoutError(
            f"pp={pp} times vpp={vpp} makes {num_stages} stages and the model has {num_blocks} "
            f"blocks; use at most {num_blocks} stages"
        )
    tps = tuple(stage_tps) or (tp,) * num_stages
    if len(tps) != num_stages or any(dp * tp % own for own in tps):
        raise LayoutError(
            f"stage_tps={tps}: give one tp for each of the {num_stages} stages, each a divisor of "
            f"dp*tp={dp * tp}"
        )
    if any(microbatch_size * own % tp for own in tps):
        raise LayoutError(
            f"stage_tps={tps}: microbatches of {microbatch_size} on dp={dp} can't be divided over "
            f"dp={dp * tp // min(tps)}; use a microbatch_size that {tp // min(tps)} divides"
        )
    if balance:
        check_balance(balance, num_blocks=num_blocks, num_stages=num_stages)
        bounds = [sum(balance[:s]) for s in range(num_stages + 1)]
    else:
        bounds = [num_blocks * s // num_stages for s in range(num_stages + 1)]
    stages = tuple(
        StagePlan(
            pp_rank=homes[s],
            first_block=bounds[s],
            last_block=bounds[s + 1] - 1,
            recompute=recompute,
            tp=None if tps[s] == tp else tps[s],
        )
        for s in range(num_stages)
    )
    layouts: list[ClassLayout] = []
    for own in sorted(set(tps)):
        used = {
            graph.blocks[b].class_index
            for stage, stage_tp in zip(stages, tps, strict=True)
            for b in stage.blocks
            if stage_tp == own
        }
        found = default_layouts(graph, tp=own, cp=cp, microbatch_size=microbatch_size * own // tp)
        layouts += [
            layout.model_copy(update={"tp": None if own == tp else own})
            for layout in found
            if layout.class_index in used
        ]
    return Plan(
        model=model_ref(graph, file=file),
        cluster=ClusterRef(name="none", device="cpu", devices_per_node=dp * cp * tp * pp),
        dp=dp,
        cp=cp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches or max(2 * pp, 1),
        schedule=schedule,
        zero_stage=zero_stage,
        stages=stages,
        layouts=tuple(layouts),
    )


def default_layouts(
    graph: ModelGraph, *, tp: int, cp: int, microbatch_size: int
) -> tuple[ClassLayout, ...]:
    """Return propagated layouts of every class on tp and, of what that makes, on cp."""
    on_tp: tuple[ClassLayout, ...] = ()
    if tp > 1:
        on_tp = propagate_graph(graph, microbatch_size=microbatch_size, axis_size=tp)
    if cp == 1:
        return on_tp
    by_class = {layout.class_index: layout for layout in on_tp}
    programs = [
        lower(program.bind(microbatch_size), by_class.get(index), axis_size=tp)
        for index, program in enumerate(graph.classes)
    ]
    on_cp = propagate_cp(graph, programs, microbatch_size=microbatch_size, cp=cp)
    return (*on_tp, *on_cp)


def check_balance(balance: Sequence[int], *, num_blocks: int, num_stages: int) -> None:
    """Raise LayoutError unless `balance` deals every block to one of the stages, in order."""
    given = ",".join(map(str, balance))
    if len(balance) != num_stages:
        raise LayoutError(
            f"balance={given} is for {len(balance)} stages and pp*vpp={num_stages}; "
            "give one number of blocks for each stage"
        )
    if min(balance) < 1 or sum(balance) != num_blocks:
        raise LayoutError(
            f"balance={given} deals {sum(balance)} blocks and the model has {num_blocks}; "
            f"the numbers must be 1 or more and add up to {num_blocks}"
        )


def model_ref(graph: ModelGraph, *, file: str) -> ModelRef:
    """Return how a plan names the model of a graph."""
    return ModelRef(
        name=graph.name,
        file=file,
        fingerprint=graph.fingerprint,
        inputs=batch_spec(graph),
        batch_tree=graph.batch_tree,
    )
