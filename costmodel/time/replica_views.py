"""Stages whose replicas lie on several groups of devices: what each replica's pipeline is.

A replica of a stage lies on one group. From the first stage to the last it is a pipeline that waits
for no other replica but in what they exchange, so it is priced as a plan whose stages lie on its
own groups and whose microbatches have its share of samples:

    step_s = max over replicas k of step_s of k's view

Exact where replicas meet once a step (ZeRO 0 and 1): the last to come sets the pace. Under ZeRO 2
and 3 they meet in every job, and the view of the slowest is a lower bound where no one replica is
slowest in all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from costmodel.cache import CostCache
from planner.errors import PlanError
from planner.language.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """The plan as some replicas see it."""

    plan: Plan
    """Stages on these replicas' groups; `microbatch_size` is their share."""
    costs: CostCache
    """Prices on these groups, of which stages may have a part of their ranks."""
    replicas: int
    """How many replicas see it so."""


def replica_views(plan: Plan, costs: CostCache) -> tuple[ReplicaView, ...]:
    """Return the views of all replicas, equal ones together; of most plans one.

    Raises PlanError where the groups of a stage do not hold whole replicas.
    """
    spans = any(len(stage.device_groups) > 1 for stage in plan.stages)
    if not spans and not plan.shares:
        return (ReplicaView(plan=plan, costs=costs, replicas=1),)
    # With as many replicas in all stages, replica k of a stage hands on to replica k of the next.
    parts = {plan.stage_degrees(index).along("batch") for index in range(len(plan.stages))}
    if len(parts) > 1:
        raise PlanError(
            f"stages of the plan cut the batch in {' and '.join(map(str, sorted(parts)))} parts "
            "and have replicas on several groups of devices, so a replica of a stage has none of "
            "the next; give all stages one mesh"
        )
    (num_replicas,) = parts
    shares = plan.shares or (plan.microbatch_size,) * num_replicas
    on_groups = [_groups_of_replicas(plan, index, costs) for index in range(len(plan.stages))]
    found: dict[tuple, int] = {}
    for replica, share in enumerate(shares):
        # Replicas with as many samples on the same groups run the same pipeline at the same times.
        key = share, tuple(groups[replica] for groups in on_groups)
        found[key] = found.get(key, 0) + 1
    return tuple(
        ReplicaView(
            plan=_seen(plan, share, [name for name, _ in places]),
            costs=costs.with_stage_ranks({name: ranks for name, ranks in places if ranks}),
            replicas=count,
        )
        for (share, places), count in found.items()
    )


def _seen(plan: Plan, share: int, groups: Sequence[str]) -> Plan:
    stages = tuple(
        stage.model_copy(update={"device_group": group})
        for stage, group in zip(plan.stages, groups, strict=True)
    )
    return plan.model_copy(update={"stages": stages, "microbatch_size": share, "shares": ()})


def ranks_on_groups(plan: Plan, pp_rank: int, costs: CostCache) -> dict[str, int]:
    """Return how many ranks of a stage lie on each group of devices, for the stages of a pp rank.

    Raises PlanError where the cluster has no such group.
    """
    names, num_ranks = plan.device_groups[pp_rank].split("+"), plan.degrees.num_ranks
    if len(names) == 1:
        costs.of_group(names[0])
        return {names[0]: num_ranks}
    return dict(zip(names, _sizes(plan, names, costs), strict=True))


def _sizes(plan: Plan, names: Sequence[str], costs: CostCache) -> list[int]:
    """Return how many ranks a stage has on each of several groups: stages that name one take equal
    parts of it.
    """
    for name in names:
        costs.of_group(name)  # raises, where there is none
    takers = [name for rank in plan.device_groups for name in rank.split("+")]
    return [costs.group_sizes[name] // takers.count(name) for name in names]


def _groups_of_replicas(plan: Plan, index: int, costs: CostCache) -> list[tuple[str, int]]:
    """Return for each replica of a stage its group, and how many ranks of the stage that holds; 0
    where it holds all.
    """
    stage, degrees = plan.stages[index], plan.stage_degrees(index)
    num_replicas = degrees.along("batch")
    names = stage.device_groups
    if len(names) == 1:
        return [(names[0], 0)] * num_replicas
    sizes = _sizes(plan, names, costs)
    ranks_of_replica = degrees.num_ranks // num_replicas
    if sum(sizes) != degrees.num_ranks or any(size % ranks_of_replica for size in sizes):
        raise PlanError(
            f"stage {index} lies on {stage.device_group}, which have "
            f"{' + '.join(map(str, sizes))} devices for it, and has {num_replicas} replicas of "
            f"{ranks_of_replica} ranks; each group holds whole replicas, and all devices are used"
        )
    # Replicas fill the groups in the order in which the stage names them.
    ends = list(accumulate(size // ranks_of_replica for size in sizes))
    return [
        next((name, size) for name, size, end in zip(names, sizes, ends, strict=True) if k < end)
        for k in range(num_replicas)
    ]
