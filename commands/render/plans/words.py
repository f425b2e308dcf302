"""A plan in words: sentences, names of parts, for the screen and for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from planner.language.plan import Plan
from planner.language.plan.spelled import spell_degrees, spell_microbatches
from planner.units import format_seconds
from search.report.overview import Overview, recompute_spelled
from search.report.words import PART_MEANING, PART_WORDS

AXIS_WORDS = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "hp": "heads parallel",
    "pp": "pipeline",
    "rp": "copies of ZeRO's shards",
    "ep": "expert parallel",
}

KERNELS = {"compiled": "compiled blocks", "graphs": "compiled blocks in CUDA graphs"}
"""What a plan's kernels are called, where they are not the usual."""


def degrees_spelled(plan: Plan) -> str:
    """Return the degrees above 1: ``dp 4 x pp 2``."""
    return spell_degrees({**plan.degrees.sizes, "pp": plan.pp})


def plan_sentence(plan: Plan, overview: Overview) -> str:
    """Return what a plan decides as a sentence."""
    count = f"{overview.num_devices} {overview.device}"
    parts = [f"{overview.model} on {count}: {degrees_spelled(plan)}"]
    if plan.pp > 1:
        stages = f", {plan.vpp} stages a rank" if plan.vpp > 1 else ""
        parts.append(f"schedule {plan.schedule}{stages}")
    samples = "sample" if plan.microbatch_size == 1 else "samples"
    of_replica = "" if plan.degrees.along("batch") == 1 else " a replica"
    microbatches = spell_microbatches(plan.num_microbatches, plan.microbatch_size)
    parts.append(f"{microbatches} {samples}{of_replica}")
    if plan.degrees.along("data") > 1:
        parts.append(f"ZeRO {plan.zero_stage}" if plan.zero_stage else "no ZeRO")
    recompute = recompute_spelled(Counter(plan.recompute_by_block))
    parts.append("no recomputation" if recompute == "none" else f"recomputation {recompute}")
    if plan.on_host:
        parts.append(f"{' and '.join(plan.on_host)} on the host")
    if plan.is_compiled:
        parts.append(KERNELS[plan.kernels])
    if plan.makes_beside:
        parts.append("weight gradients beside collectives")
    if plan.gather_pieces > 1:
        parts.append(f"gathers in {plan.gather_pieces} pieces beside products")
    if plan.logit_rows:
        parts.append(f"logits of {plan.logit_rows} tokens at a time")
    runtime = "" if plan.execution == plan.runs_as else f", as {plan.execution} runs it"
    return ", ".join(parts) + runtime + "."


def experts_words(told: Mapping[str, Any]) -> str:
    """Return how rows of a plan go to their experts, as its estimate has it."""
    return (
        f"rows of experts by {' and '.join(told['dispatchers'])}; the rank that gets most has "
        f"{told['fullest']:.2f} times the mean (imbalance {told['imbalance']:.2f}, "
        f"{told['imbalance_from']})"
    )


def counted(number: int, single: str, plural: str) -> str:
    """Return a number with its noun."""
    return f"{number} {single if number == 1 else plural}"


def compact(number: float) -> str:
    """Return a rate or count in a short form: ``66.2 k``, ``8.03 B``."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def labelled(parts: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Return (label, meaning, seconds) of parts that take time, in order."""
    return [
        (PART_WORDS.get(name, name), PART_MEANING.get(name, ""), seconds)
        for name, seconds in parts.items()
        if seconds > 0
    ]


def loses(differences: Sequence[tuple[str, float]]) -> str:
    """Return by which parts a plan is slower and faster than the best, the two largest of each;
    `differences` are seconds that its parts take longer.
    """
    told = []
    for verb, sign in (("loses", 1), ("gains", -1)):
        parts = [(sign * seconds, name) for name, seconds in differences if sign * seconds > 0]
        if parts:
            listed = ", ".join(
                f"{format_seconds(seconds)} in {PART_WORDS.get(name, name)}"
                for seconds, name in sorted(parts, reverse=True)[:2]
            )
            told.append(f"{verb} {listed}")
    return ", ".join(told) or "the same time"
