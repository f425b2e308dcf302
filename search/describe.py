"""A search's answer for people: the plan chosen, how sure that is, and what lost to it."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan import Plan
from planner.units import format_bytes, format_seconds
from search.request import Certificate, RunnerUp, SearchResult


def describe_result(result: SearchResult) -> list[RenderableType]:
    """Return the chosen plan, its certificate and the runners-up, or why there is no plan."""
    if result.plan is None:
        return [Text(reason) for reason in result.reasons]
    parts: list[RenderableType] = [_chosen(result.plan)]
    if result.certificate is not None:
        parts.append(_certificate(result.certificate, result.search_s))
    if result.runners_up:
        parts.append(_runners_up(result.runners_up))
    return parts


def _chosen(plan: Plan) -> Text:
    axes = (("dp", plan.dp), ("cp", plan.cp), ("tp", plan.tp), ("pp", plan.pp), ("vpp", plan.vpp))
    degrees = " ".join(f"{axis}={degree}" for axis, degree in axes if degree > 1) or "one device"
    recompute = {stage.recompute for stage in plan.stages}
    return Text(
        f"best plan: {degrees}, microbatches {plan.num_microbatches} of {plan.microbatch_size}, "
        f"{plan.schedule}, ZeRO {plan.zero_stage}, recompute {' or '.join(sorted(recompute))}\n"
        f"expected: {format_seconds(plan.estimate['step_s'])} a step, "
        f"{format_bytes(plan.estimate['peak_bytes'])} at most on one device"
    )


def _certificate(certificate: Certificate, search_s: float) -> Text:
    pruned = ", ".join(f"{count} by {rule}" for rule, count in certificate.pruned if count)
    verdict = (
        "proved best under the cost model"
        if certificate.gap == 0
        else f"within {certificate.gap:.1%} of the best possible under the cost model"
    )
    text = (
        f"{verdict}: {certificate.considered} configurations considered in "
        f"{format_seconds(search_s)}, {certificate.evaluated} priced"
    )
    if pruned:
        text += f"; ruled out: {pruned}"
    if certificate.stopped_early:
        text += f"; stopped early: {certificate.stopped_early}"
    return Text(text)


def _runners_up(runners_up: tuple[RunnerUp, ...]) -> Table:
    table = Table("runner-up", "step", "memory", "why not", title_justify="left")
    for runner in runners_up:
        table.add_row(
            Text(runner.label),
            format_seconds(runner.step_s),
            format_bytes(runner.peak_bytes),
            Text(runner.reason),
        )
    return table
