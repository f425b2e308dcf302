"""Many plans of one model, run in turns on two ranks of this machine, and what their steps took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, note
from planner.language.plan import Plan, save_plan
from profiles import Profile
from profiles.lookup.families import pace_kind
from profiles.measure.visits import undisturbed_pace
from profiles.records import PaceKind


def describe(plan: Plan) -> str:
    """Name a plan by its choices."""
    experts = f"ep{plan.degrees['ep']} " if plan.degrees["ep"] > 1 else ""
    return (
        f"dp{plan.dp} tp{plan.tp} {experts}pp{plan.pp} vpp{plan.vpp} zero{plan.zero_stage} "
        f"micro{plan.microbatch_size} {plan.schedule} {plan.stages[0].recompute_spelled}"
    )


def run_plans(
    plans: list[Plan], folder: Path, *, steps: int, turns: int, jobs: bool = False
) -> None:
    """Run every plan in turns, as `planner launch` does: see `plan_runs_rank`. Leaves each
    step's seconds in the folder.
    """
    for index, plan in enumerate(plans):
        save_plan(plan, folder / f"plan-{index:03}.json")
    script = Path(__file__).with_name("plan_runs_rank.py")
    command = [sys.executable, "-m", "cli", "launch", "--device", "cpu",
               str(folder / "plan-000.json"), str(script), str(folder),
               str(steps), str(turns), str(int(jobs))]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        note(f"stopped early: {done.stderr[-2000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What a model's runs took, by plan and turn."""

    turns: dict[int, list[Turn]]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read the first rank's steps, as a step ends at once on both, and both ranks' paces."""
        ranks = [(folder / f"seconds-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
        runs = cls(turns={})
        for lines in zip(*map(sorted_turns, ranks), strict=True):
            index = lines[0]["plan"]
            paces = {
                kind: statistics.fmean(p for line in lines for p in line["paces"][kind])
                for kind in lines[0]["paces"]
            }
            turn = Turn(step_s=statistics.fmean(lines[0]["seconds"]), paces=paces)
            runs.turns.setdefault(index, []).append(turn)
        return runs

    @property
    def step_s(self) -> dict[int, float]:
        """Each plan's step time: the median of its turns."""
        return {
            index: statistics.median(turn.step_s for turn in turns)
            for index, turns in self.turns.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The mean step of a plan's turn, and the mean seconds of the fixed works beside it, by kind.

    Means, as a machine that is disturbed part of the time is slower by the share of it: medians
    of the two, which are taken at different moments, would fall on different sides.
    """

    step_s: float
    paces: dict[PaceKind, float]

    def slowed(self, profile: Profile) -> Profile:
        """Return the profile of the machine as slow as it was beside this turn, which is told
        as the profile tells how slow it was beside its own visits.
        """
        slowdowns = {}
        for kind, figure in profile.file.typical_slowdown.items():
            own = [p for r in profile.ops if pace_kind(r.target) == kind for p in r.paces]
            value = self.paces[kind] / undisturbed_pace(own)
            slowdowns[kind] = figure.model_copy(update={"value": value})
        file = profile.file.model_copy(update={"typical_slowdown": slowdowns})
        return Profile(file, profile.ops, profile.collectives)


def sorted_turns(lines: list[str]) -> list[dict]:
    """Return a rank's turns, plan by plan in the order in which they ran."""
    return sorted(map(json.loads, lines), key=lambda turn: turn["plan"])
