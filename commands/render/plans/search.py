"""A search's answer for people: the plan chosen, how sure that is, and what lost to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commands.common.measured import turns_spread
from commands.render.flags import with_flags
from commands.render.plans.parts import memory_range
from commands.render.tables import light_table
from costmodel.uncertainty import plan_memory_interval
from planner.language.layout.axes import own_axes
from planner.language.plan import Plan
from planner.language.plan.spelled import spell_choices
from planner.units import format_bytes, format_seconds
from profiles import Profile
from search.report.explain import Comparison, differences, explain_saving, explain_shortfall
from search.report.pareto import Point
from search.report.remedies import Advice
from search.report.words import PART_WORDS
from search.request import SearchResult

if TYPE_CHECKING:
    from planner.runtime.proofs.trials import Trial

MOST_POINTS = 12
"""Plans of a front that are shown."""


def describe_pareto(points: Sequence[Point], file: Path | None = None) -> Table:
    """Return the plans of which none is worse than another in everything that is compared."""
    counts = len({point.num_devices for point in points}) > 1
    priced = any(point.cost_per_step for point in points)
    compared = ["time", "memory", *["GPUs"] * counts, *["cost"] * priced]
    title = f"{', '.join(compared[:-1])} against {compared[-1]}"
    columns = ["step", "memory", *["GPUs"] * counts, *["cost"] * priced]
    table = light_table(*columns, "plan", title=title[0].upper() + title[1:], numbers=columns)
    shown = points
    if len(points) > MOST_POINTS:  # evenly along the front
        last = len(points) - 1
        shown = [points[round(n * last / (MOST_POINTS - 1))] for n in range(MOST_POINTS)]
        others = f"{file} has all" if file else with_flags("`pareto` FILE writes all")
        table.caption = Text(f"{MOST_POINTS} of {len(points)} plans; {others}")
        table.caption_justify = "left"
    for point in shown:
        row = [format_seconds(point.step_s), format_bytes(point.peak_bytes)]
        row += [str(point.num_devices)] * counts
        row += [_cost(point)] * priced
        table.add_row(*row, choices_of(point.plan))
    return table


def describe_trials(plans: Sequence[Plan], trials: Sequence[Trial]) -> Table:
    """Return what the best plans took on this machine beside what was predicted of them."""
    numbers = ("predicted", "measured", "turns differ by")
    table = light_table("plan", *numbers, title="Measured here, in turns", numbers=numbers)
    ran = [trial.step_s for trial in trials if not trial.failure]
    for plan, trial in zip(plans, trials, strict=True):
        predicted = format_seconds(plan.estimate["step_s"])
        if trial.failure:
            found = f"left out: {trial.failure}", ""
        else:
            found = format_seconds(trial.step_s), f"{turns_spread(trial):.0%}"
        is_fastest = not trial.failure and trial.step_s == min(ran)
        row = Text(choices_of(plan)), predicted, Text(found[0]), found[1]
        table.add_row(*row, style="bold" if is_fastest else "")
    return table


def _cost(point: Point) -> str:
    if point.cost_per_million_tokens is None:
        return f"{point.cost_per_step:.4g} a step"
    return f"{point.cost_per_million_tokens:.4g} a million tokens"


def describe_advice(infeasible: SearchResult, advice: Advice, limit_bytes: float) -> list[Any]:
    """Return why nothing fits and what would, each with the plan found."""
    leanest = infeasible.leanest
    assert leanest is not None, "what does not fit has a leanest plan"
    parts: list[Any] = [Text(with_flags(line)) for line in explain_shortfall(leanest, limit_bytes)]
    ways = [way for way in (*advice.remedies, advice.devices, advice.memory) if way]
    if not ways:
        return parts
    table = light_table(
        *("instead", "step", "memory", "against the leanest plan asked for"),
        title="What would fit",
        numbers=("step", "memory"),
    )
    for way in ways:
        table.add_row(
            Text(with_flags(way.what)),
            format_seconds(way.step_s),
            format_bytes(way.peak_bytes),
            Text(explain_saving(leanest, way.plan)),
        )
    return [*parts, table]


def describe_comparison(comparison: Comparison) -> list[RenderableType]:
    """Return why the given choices do not fit, or by which parts they are slower."""
    given, best = comparison.given, comparison.best
    if given is None:
        parts: list[RenderableType] = [
            Text(f"refused: {with_flags(line)}") for line in comparison.shortfall
        ]
        return (
            parts
            if best is None
            else [*parts, Text("instead, the best that fits:"), _chosen(best, comparison.profile)]
        )
    assert best is not None, "a plan of the given choices is one of all plans"
    mine, theirs = given.estimate["step_s"], best.estimate["step_s"]
    if mine <= theirs:
        return [Text("this is the ") + _chosen(given, comparison.profile)]
    numbers = ("given", "best", "difference")
    table = light_table("part of a step", *numbers, title="Where the time goes", numbers=numbers)
    for name, seconds, best_seconds in differences(given.estimate, best.estimate):
        table.add_row(PART_WORDS.get(name, name), *_difference(seconds, best_seconds))
    table.add_row("step", *_difference(mine, theirs), style="bold")
    return [
        Text(f"{mine / theirs - 1:.1%} slower than the best plan"),
        Text("given, at its best: ") + Text(choices_of(given)),
        Padding(_memory_of(given, comparison.profile), (0, 0, 0, 2)),
        Text("best of all: ") + Text(choices_of(best)),
        Padding(_memory_of(best, comparison.profile), (0, 0, 0, 2)),
        table,
    ]


def _difference(given_s: float, best_s: float) -> tuple[str, str, str]:
    sign = "+" if given_s >= best_s else "-"
    change = f"{sign}{format_seconds(abs(given_s - best_s))}"
    return format_seconds(given_s), format_seconds(best_s), change


def _memory_of(plan: Plan, profile: Profile) -> str:
    interval = plan_memory_interval(plan, profile)
    sure = "" if interval is None else f", {memory_range(**asdict(interval))}"
    return f"{format_bytes(plan.estimate['peak_bytes'])} on the fullest device{sure}"


def _chosen(plan: Plan, profile: Profile) -> Text:
    measured = plan.estimate.get("measured")
    found = "" if measured is None else f"measured: {format_seconds(measured['step_s'])} a step\n"
    runtime = "" if plan.execution == plan.runs_as else f" for {plan.execution}"
    return Text(
        f"best plan{runtime}: {choices_of(plan)}\n{found}"
        f"expected: {format_seconds(plan.estimate['step_s'])} a step, "
        f"{_memory_of(plan, profile)}"
    )


def choices_of(plan: Plan) -> str:
    """Return what a plan decides, in a line."""
    sizes: dict[str, object] = {**plan.degrees, "pp": plan.pp}
    if any(stage.own_sizes for stage in plan.stages):
        for axis in own_axes():
            found = [plan.stage_degrees(s)[axis.name] for s in range(len(plan.stages))]
            sizes[axis.name] = "/".join(map(str, found))
    if any(plan.device_groups):
        sizes["pp"] = f"{plan.pp} on {'/'.join(plan.device_groups)}"
    shares = f" (replicas of {plan.shares_spelled})" if plan.shares else ""
    return spell_choices(
        sizes, plan.vpp, (plan.num_microbatches, plan.microbatch_size), plan.schedule,
        plan.zero_stage, " or ".join(sorted(set(plan.recompute_by_block))), shares=shares,
    ) + (f", {' and '.join(plan.on_host)} on the host" if plan.on_host else "")  # fmt: skip
