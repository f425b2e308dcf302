"""What a plan file should cost, for the commands that show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.inputs import graph_of_plan, profile_named
from commands.render.console import show_progress

if TYPE_CHECKING:
    from costmodel import CostCache, Estimate
    from costmodel.table.fusion import Kernels
    from planner.plan import Plan
    from profiles import Profile


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan, what it should cost, and the prices that say so.

    `profile` is the one that was named or chosen; `note` is a line for the user if that is not this
    machine's own.
    """

    plan: Plan
    profile: Profile
    costs: CostCache
    estimate: Estimate
    note: str


def predict(
    plan: Path,
    model: Path,
    profile: str | None,
    *,
    doing: str,
    kernels: Kernels = "eager",
    clip_gradients: bool = False,
) -> Prediction:
    """Price a plan file for a model file under a profile, with a progress bar."""
    from costmodel import CostCache
    from costmodel import estimate as estimate_plan
    from costmodel.in_training import in_training
    from planner.plan import load_plan

    loaded = load_plan(plan)
    machine, note = profile_named(profile)
    with show_progress(doing):
        graph = graph_of_plan(loaded, model)
        costs = CostCache(
            graph, in_training(machine, loaded.world_size), kernels=kernels,
            clips_gradients=clip_gradients,
        )  # fmt: skip
        estimated = estimate_plan(graph, machine, loaded, costs=costs)
    return Prediction(plan=loaded, profile=machine, costs=costs, estimate=estimated, note=note)
