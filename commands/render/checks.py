"""Checks for people: the bytes of a dry run; how far a plan is from one process."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.tables import light_table
from planner.capture.modes.ledger import MemorySample
from planner.runtime.proofs.by_block.report import Proof
from planner.runtime.proofs.dryrun import DryRun
from planner.runtime.proofs.verify import KINDS, ROUNDINGS, Difference, VerifyReport
from planner.units import format_bytes

MAX_MOMENTS = 40
"""Parts of a step that a dry run lists; of more, only those that set a new height."""

JOB_NAMES = (
    "F0.2: forward of stage 0, microbatch 2; B, I, W: backward, of inputs alone, of weights alone; "
    "REDUCE: sums of gradients; CHECK: whether they are finite; O: optimizer"
)
"""What the names of parts of a step mean."""


def describe_dry_run(run: DryRun) -> list[RenderableType]:
    """Return a rank's bytes after each part of a step, and where they are highest."""
    offloads = bool(run.host_peak_bytes)
    numbers = ["bytes at its end", "highest inside", *["on the host"] * offloads]
    table = light_table("part of the step", *numbers, numbers=numbers)
    top = max((moment.peak_bytes for moment in run.samples), default=0)
    shown = run.samples if len(run.samples) <= MAX_MOMENTS else _new_heights(run.samples)
    for moment in shown:
        table.add_row(
            Text(moment.name),
            format_bytes(moment.end_bytes),
            format_bytes(moment.peak_bytes),
            *([format_bytes(moment.host_bytes)] if offloads else []),
            style="bold" if moment.peak_bytes == top else None,
        )
    left_out = len(run.samples) - len(shown)
    return [
        Text(
            f"rank {run.rank} (pp rank {run.pp_rank}) needs {format_bytes(run.peak_bytes)} at the "
            f"height of a step and {format_bytes(run.rest_bytes)} between steps, in tensors; the "
            "context of its process and what the allocator rounds up come on top\n",
            style="bold",
        ),
        table,
        Text(JOB_NAMES),
        *([Text(f"{left_out} parts that reached no new height are left out")] if left_out else []),
        Text(
            f"when it starts it holds {format_bytes(run.start_bytes)} at most, and "
            f"{format_bytes(run.start_host_bytes)} of host memory beside them to make first values"
        ),
        *(
            [
                Text(
                    f"on the host it holds {format_bytes(run.host_rest_bytes)} between steps and "
                    f"at most {format_bytes(run.host_peak_bytes)} in a step"
                )
            ]
            if offloads
            else []
        ),
    ]


def _new_heights(moments: Sequence[MemorySample]) -> list[MemorySample]:
    """Return the moments that reached higher than all before them, and the last."""
    kept: list[MemorySample] = []
    for moment in moments:
        if not kept or moment.peak_bytes > kept[-1].peak_bytes:
            kept.append(moment)
    return kept if kept[-1] is moments[-1] else [*kept, moments[-1]]


def describe_verification(report: VerifyReport) -> list[RenderableType]:
    """Return how far a plan's training is from one process's, and the verdict."""
    numbers = ("difference", "rounding", "times rounding")
    table = light_table("", *numbers, "at step", numbers=(*numbers, "at step"))
    table.add_column("in", overflow="fold")
    for kind in KINDS:
        found: Difference = getattr(report, kind)
        if not found.name:  # a model without buffers
            continue
        table.add_row(
            kind,
            f"{found.relative:.2e}",
            f"{found.rounding:.2e}",
            f"{found.times:.3g}",
            str(found.step),
            Text(found.name),
        )
    worst = report.worst
    if report.passed:
        verdict = (
            f"the same as one process: no difference is beyond {ROUNDINGS:.0f} times its rounding"
        )
    elif report.is_undecided:
        return [
            Text(
                f"undecided: {worst.name} differs by {worst.relative:.2e} of the largest, more "
                f"than the {report.tolerance:.0e} that is allowed, but one process differs from "
                f"itself by {worst.rounding:.2e} there by rounding; rounding grows from step to "
                "step, so verify with --steps 1\n",
                style="bold",
            ),
            table,
        ]
    else:
        verdict = (
            f"NOT the same as one process: {worst.name} differs by {worst.relative:.2e}, "
            f"{worst.times:.3g} times its rounding ({ROUNDINGS:.0f} are allowed)"
        )
    return [
        Text(
            f"{report.num_ranks} ranks compute {verdict}, or {report.tolerance:.0e} of the "
            f"largest, in fp64 over {report.steps} step{'s' * (report.steps > 1)}\n",
            style="bold",
        ),
        table,
        Text(
            "difference: the worst of each kind, relative to the largest entry of that kind; "
            "rounding: how far the one process comes apart from itself in the same tensor, with "
            "its weights moved by one unit in the last place and its samples in another order"
        ),
        *(Text(f"note: {note}") for note in report.notes),
    ]


def describe_proof(proof: Proof) -> list[RenderableType]:
    """Return what was proven of a plan by its blocks, what was cut, what is wrong, what is open."""
    numbers = ("times rounding", "took")
    table = light_table("", "part", "shown on", *numbers, numbers=numbers)
    for part in proof.parts:
        table.add_row(
            "WRONG" if part.faults else "proven",
            part.name,
            part.counted,
            "" if part.times_rounding is None else f"{part.times_rounding:.3g}",
            f"{part.seconds:.1f} s",
        )
    faults = [fault for part in proof.parts for fault in part.faults]
    verdict = (
        "every part that can be shown without its ranks is proven"
        if proof.passed
        else f"NOT proven: {faults[0]}"
    )
    return [
        Text(f"plan of {proof.world_size} ranks: {verdict}\n", style="bold"),
        table,
        *(Text(f"wrong: {fault}") for fault in faults[1:]),
        *(Text(f"run as: {cut}") for cut in proof.cuts),
        *(Text(f"not proven: {with_flags(each)}") for each in proof.unproven),
    ]
