"""Ways to cut a long sequence over cp, predicted and run on ranks of this machine.

Attention by queries with keys and values gathered, by heads, and over a ring, each with one piece
of the sequence on a rank, with several, and mirrored. Plans take turns; a row has a way's step as
predicted from a profile of this machine (measured if none is given) and as measured, and its bytes.
A note says how many pairs of ways, 5% or more apart in both, are predicted in the measured order.
On a CPU nothing hides what a ring sends, and ranks share caches and memory: it needs a quiet
machine, with a core for each rank.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, note
from benchmarks.machine.gpt import write_model
from benchmarks.machine.predict_cpu import H100, profiled
from costmodel import estimate
from costmodel.estimate import cost_cache
from planner.errors import LayoutError
from planner.language.layout.axes import find_axis
from planner.language.layout.placement import Shard, parse_placement
from planner.language.lowering.attention_cut import IN_PIECES, AttentionBy
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.propagate import propagate_on
from planner.runtime.proofs.trials import TrialSettings, run_trials

BORDERS = ("S(1)", "S(1)x2", "S(1)z2", "S(1)x4")
"""One piece of the sequence on a rank, two, two mirrored ones, four."""

APART = 0.05
"""Ways less apart than this have no order."""


@benchmark(
    "sequence_cuts",
    quick={
        "model": "tiny",
        "ranks": 2,
        "borders": BORDERS[:1],
        "steps": 1,
        "turns": 1,
        "profile": H100,
    },
)
def sequence_cuts(
    *,
    model: str = "long",
    ranks: int = 4,
    borders: Annotated[tuple[str, ...], "how blocks hand on sequences"] = BORDERS,
    steps: int = 5,
    turns: int = 3,
    budget: Annotated[float, "seconds to measure the machine"] = 120.0,
    keep: Annotated[Path | None, "a folder whose profile is used, or kept there"] = None,
    profile: Annotated[str | None, "a shipped one in place of this machine's"] = None,
) -> Result:
    ways: list[tuple[AttentionBy, str]] = [("heads", "S(1)")]
    ways += [(kind, border) for border in borders for kind in IN_PIECES]
    with profiled(keep, [model], budget, profile) as (folder, machine):
        path, graph = write_model(model, folder)
        costs = cost_cache(graph, machine, ranks)
        plans, tried = [], []
        for kind, border in ways:
            place = parse_placement(border)
            assert isinstance(place, Shard)
            try:
                cut = propagate_on(
                    graph, find_axis("cp"), size=ranks, microbatch_size=1,
                    attention=kind, segments=place.segments, mirrored=place.mirrored,
                )  # fmt: skip
            except LayoutError as error:
                note(f"{kind}, {border}: {error}")
                continue
            plan = default_plan(graph, cp=ranks, microbatch_size=1, num_microbatches=1)
            plan = plan.model_copy(update={"layouts": cut})
            answer = estimate(graph, machine, plan, costs=costs)
            plans.append(plan.model_copy(update={"estimate": answer.to_dict()}))
            tried.append((kind, border, answer))
        settings = TrialSettings(steps=steps, turns=turns)
        trials = run_trials(plans, graph, path, device="cpu", settings=settings)
    rows = [
        {
            "attention": kind,
            "border": border,
            "predicted_s": round(answer.step_s, 5),
            "measured_s": round(trial.step_s, 5) if trial.turns_s else None,
            "predicted_mib": round(answer.peak_bytes / 2**20, 1),
            "failed": trial.failure,
        }
        for (kind, border, answer), trial in zip(tried, trials, strict=True)
    ]
    return Result(rows, [_order(rows)], failed=any(row["failed"] for row in rows))


def _order(rows: list[dict]) -> str:
    ran = [row for row in rows if row["measured_s"]]
    told = right = 0
    for first, second in combinations(ran, 2):
        predicted, measured = (
            first[what] / second[what] - 1 for what in ("predicted_s", "measured_s")
        )
        if min(abs(predicted), abs(measured)) >= APART:
            told += 1
            right += (predicted > 0) == (measured > 0)
    return f"of {told} pairs of ways that are apart, {right} are predicted in the measured order"
