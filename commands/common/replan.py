"""Searching again while a run is going on: for the devices that are left, or for less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.inputs import graph_of_plan
from planner.errors import LayoutError, PlanError, ProfileError

if TYPE_CHECKING:
    from planner.language.plan import Plan


def replanner(plan: Plan, profile_name: str | None) -> Callable[[Sequence[int], int | None], Plan]:
    """Return what finds the fastest plan like `plan` for other numbers of ranks or less memory.

    Model, global batch, precision and runtime are the plan's; degrees, schedule and all else are
    searched. Raises PlanError now where the plan does not lead to its model file or profile.
    """
    import profiles
    from planner.language.plan import RUNTIME_OF

    model = Path(plan.model.file)
    if not model.is_file():
        raise PlanError(
            f"the plan is for {plan.model.file or 'a model without a file'}, which is not here, "
            "and another plan may have to be searched; run the command where `planner search` ran"
        )
    graph = graph_of_plan(plan, model)
    name = profile_name or plan.cluster.name
    try:
        profile = profiles.load_profile(name)
    except ProfileError as error:
        raise PlanError(
            f"the plan was searched for {name!r}, which can't be read ({error}), and another plan "
            "may have to be searched; name the machine with `profile`"
        ) from error

    is_ours = plan.execution in RUNTIME_OF.values()

    def replan(counts: Sequence[int], memory_limit_bytes: int | None) -> Plan:
        from search import SearchRequest, find_plan_once

        found: list[Plan] = []
        refused: list[str] = []
        for count in counts:
            try:
                request = SearchRequest(
                    num_devices=count,
                    global_batch=plan.global_batch,
                    memory_limit_bytes=memory_limit_bytes,
                    model_file=str(model),
                    precision=plan.precision,
                    execution=plan.runs_as if is_ours else plan.execution,
                    receive_ahead=plan.receive_ahead,
                    overlap="auto" if plan.overlaps else "none",
                    accept=plan.accept,
                )
                result = find_plan_once(graph, profile, request)
            except LayoutError as error:
                refused.append(f"{count} ranks: {error}")
                continue
            if result.plan is None:
                refused.append(f"{count} ranks: {result.reasons[0]}")
            else:
                found.append(result.plan)
        if not found:
            raise PlanError(
                f"no plan for {plan.model.name} and a global batch of {plan.global_batch} on what "
                f"is left ({'; '.join(refused)}); search one by hand and launch it with `keep`"
            )
        return min(found, key=lambda each: float(each.estimate["step_s"]))

    return replan
