"""What commands print with `--json`: a dict for each command, whose keys have units in their names.

`docs/json.md` lists the keys. Seconds end in `_s`, bytes in `_bytes`, parts of a whole in
`_fraction` (or `gap`, `share`, `mfu`, `relative`); others are counts, names or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from commands.render.flags import with_flags

if TYPE_CHECKING:
    from costmodel.compare import RunComparison
    from costmodel.failures import Goodput
    from planner.language.plan import Plan
    from planner.language.schedule.timing.simulate import Timeline
    from planner.runtime.proofs.by_block.report import Proof
    from planner.runtime.proofs.dryrun import DryRun
    from planner.runtime.proofs.verify import VerifyReport
    from planner.timeline import RankTimeline
    from profiles import Profile
    from search.report.explain import Comparison
    from search.report.remedies import Advice
    from search.request import SearchResult


def refused_search(result: SearchResult, advice: Advice) -> dict[str, Any]:
    """Return why nothing fits and what would."""
    ways = [way for way in (*advice.remedies, advice.devices, advice.memory) if way]
    return {
        "fits": False,
        "reasons": [with_flags(reason) for reason in result.reasons],
        "smallest_memory_bytes": result.smallest_memory_bytes,
        "instead": [
            {"what": with_flags(way.what), "step_s": way.step_s, "peak_bytes": way.peak_bytes}
            for way in ways
        ],
    }


def goodput_data(found: Goodput, *, num_nodes: int, step_s: float) -> dict[str, Any]:
    """Return the parts of a long training's time as fractions, and how often to save."""
    parts = ("useful", "checkpoints", "lost", "restarting", "slow")
    return {
        "num_nodes": num_nodes,
        "mtbf_s": found.mtbf_s,
        "checkpoint_interval_s": found.interval_s,
        "checkpoint_interval_steps": max(1, round(found.interval_s / step_s)),
        **{f"{name}_fraction": getattr(found, name) for name in parts},
    }


def plan_data(path: Path, plan: Plan) -> dict[str, Any]:
    """Return a plan file as it is, the estimate apart."""
    return {
        "plan_file": str(path),
        "plan": plan.model_dump(mode="json", exclude={"estimate"}),
        "estimate": plan.estimate,
    }


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return the given choices beside the best plan."""
    from search.report.explain import differences

    given, best = comparison.given, comparison.best
    is_best, parts = False, []
    if given is not None and best is not None:
        is_best = given.estimate["step_s"] <= best.estimate["step_s"]
        parts = [
            {"part": name, "given_s": seconds, "best_s": best_s}
            for name, seconds, best_s in differences(given.estimate, best.estimate)
        ]
    return {
        "fits": given is not None,
        "refused": [with_flags(line) for line in comparison.shortfall],
        "given": _priced(given, comparison.profile),
        "best": _priced(best, comparison.profile),
        "is_best": is_best,
        "parts": parts,
    }


def _priced(plan: Plan | None, profile: Profile) -> dict[str, Any] | None:
    from commands.render.plans.search import choices_of

    if plan is None:
        return None
    from costmodel.uncertainty import plan_memory_interval

    told, interval = plan.estimate, plan_memory_interval(plan, profile)
    return {
        "choices": choices_of(plan),
        "step_s": told["step_s"],
        "peak_bytes": told["peak_bytes"],
        "memory_interval": interval and asdict(interval),
        "plan": plan.model_dump(mode="json", exclude={"estimate"}),
    }


def verification_data(report: VerifyReport) -> dict[str, Any]:
    """Return how far a plan's training is from one process's."""
    from planner.runtime.proofs.verify import KINDS

    found = {kind: getattr(report, kind) for kind in KINDS}
    return {
        "passed": report.passed,
        "num_ranks": report.num_ranks,
        "steps": report.steps,
        "tolerance": report.tolerance,
        "differences": [
            {
                "kind": kind,
                "name": each.name,
                "step": each.step,
                "relative": each.relative,
                "rounding": each.rounding,
                "times_rounding": each.times,
            }
            for kind, each in found.items()
            if each.name
        ],
        "losses": list(report.losses),
        "reference_losses": list(report.reference_losses),
        "notes": list(report.notes),
    }


def proof_data(proof: Proof) -> dict[str, Any]:
    """Return what was proven of a plan by its blocks."""
    return {
        "passed": proof.passed,
        "num_ranks": proof.world_size,
        "parts": [
            {
                "name": part.name,
                "shown_on": part.counted,
                "times_rounding": part.times_rounding,
                "took_s": part.seconds,
                "faults": list(part.faults),
            }
            for part in proof.parts
        ],
        "run_as": list(proof.cuts),
        "not_proven": list(proof.unproven),
    }


def dry_run_data(run: DryRun) -> dict[str, Any]:
    """Return a rank's bytes, job by job."""
    data = asdict(run)
    samples = data.pop("samples")
    return {
        **data,
        "peak_bytes": run.peak_bytes,
        "host_peak_bytes": run.host_peak_bytes,
        "parts": list(samples),
    }


def timeline_data(
    timeline: Timeline, step_s: float, lines: Sequence[RankTimeline] = ()
) -> dict[str, Any]:
    """Return when each job of a simulated step runs, and what ranks exchange, as `lines` say."""
    from planner.language.schedule.step_jobs import step_jobs
    from planner.timeline import exchanges

    exchanged = {line.pp_rank: list(exchanges(line)) for line in lines}

    ranks = []
    for rank, jobs in enumerate(timeline.schedule.jobs):
        once = timeline.step_jobs_s[rank] if timeline.step_jobs_s else ()
        ranks.append(
            {
                "pp_rank": rank,
                "works_s": timeline.busy_s[rank],
                "waits_s": timeline.bubble_s[rank],
                "ends_s": timeline.rank_end_s[rank],
                "jobs": [
                    {
                        "kind": str(job.kind),
                        "stage": job.stage_index,
                        "microbatch": job.microbatch_index,
                        "start_s": float(timeline.start_s[rank][place]),
                        "end_s": float(timeline.end_s[rank][place]),
                    }
                    for place, job in enumerate(jobs)
                ],
                "step_jobs": [
                    {"kind": str(job.kind), "start_s": start_s, "end_s": end_s}
                    for job, (start_s, end_s) in zip(step_jobs(rank), once, strict=bool(once))
                ]
                if once
                else [],
                "exchanges": [
                    {
                        "lane": each.lane,
                        "name": each.span.name,
                        "stage": each.span.stage,
                        "microbatch": each.span.microbatch,
                        "start_s": each.span.start_s,
                        "end_s": each.span.end_s,
                        "hidden_s": each.hidden_s,
                        "exposed_s": each.exposed_s,
                        "num_collectives": each.span.number,
                        "num_bytes": each.span.num_bytes,
                    }
                    for each in exchanged.get(rank, [])
                ],
            }
        )
    return {
        "step_s": step_s,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "ranks": ranks,
    }


def recording_data(folder: Path, timeline: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return medians over the steps of a recorded run, of each rank."""
    from commands.render.lanes import medians
    from planner.timeline import RankBubble, bubbles, dealt_by_work

    by_rank: dict[int, list[RankBubble]] = {}
    for bubble in bubbles(timeline):
        by_rank.setdefault(bubble.rank, []).append(bubble)
    lanes = {line.rank: medians(line) for line in timeline}
    return {
        "run_folder": str(folder),
        "ranks": [
            {
                "rank": rank,
                "pp_rank": found[0].pp_rank,
                "num_steps": len(found),
                "pipeline_s": median(each.step_s for each in found),
                "compute_s": median(each.compute_s for each in found),
                "collective_s": median(each.collective_s for each in found),
                "optimizer_s": median(each.optimizer_s for each in found),
                "bubble_fraction": median(each.bubble_fraction for each in found),
                "lanes": [
                    {"lane": lane, "hidden_s": hidden_s, "exposed_s": exposed_s}
                    for lane, (hidden_s, exposed_s) in lanes[rank].items()
                ],
            }
            for rank, found in sorted(by_rank.items())
        ],
        "documents": next(iter(dealt_by_work(timeline)), None),
    }


def run_data(comparison: RunComparison) -> dict[str, Any]:
    """Return predicted beside measured seconds."""
    names = ("step_s", "bubble_fraction")
    return {
        **{
            f"{side}_{name}": getattr(comparison, f"{side}_{name}")
            for name in names
            for side in ("predicted", "measured")
        },
        "num_steps": comparison.num_steps,
        "jobs": [
            {
                "of": job.jobs.place,
                "kind": job.jobs.kind,
                "predicted_s": job.predicted_s,
                "measured_s": job.measured_s,
                "num_jobs": job.count,
            }
            for job in comparison.jobs
        ],
    }


def calibration_data(profile: Profile, folder: Path) -> dict[str, Any]:
    """Return the factors that recorded runs taught a profile."""
    found = profile.file.calibration
    assert found is not None, "it was just calibrated"
    return {
        "profile_folder": str(folder),
        "factors": {
            term: {"value": factor.value, "sigma": factor.sigma}
            for term, factor in found.factors.items()
        },
        "error_before": found.error_before,
        "error_after": found.error_after,
        "expert_imbalance": profile.expert_imbalance,
    }


def profile_data(profile: Profile, folder: str) -> dict[str, Any]:
    """Return what a profile holds, without its records."""
    return {
        "profile_folder": folder,
        "name": profile.name,
        "source": profile.source,
        "num_op_records": len(profile.ops),
        "num_collective_records": len(profile.collectives),
        "findings": list(profile.file.findings),
        "profile": profile.file.model_dump(mode="json"),
    }
