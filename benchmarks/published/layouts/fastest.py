"""Our fastest plan in any precision on compiled blocks, beside published runs of the same batch.

Of each model: what a search finds in bf16 and in 8-bit floats, with eager and with compiled blocks
of our runtime; the published runs of as many tokens on as many of the same devices; and the fastest
of their layouts as the model prices it for Megatron-LM, which tells by part what separates the two.
MFU is the model's own work (attention in full, nothing recomputed) over the devices' bf16 peak,
in 8 bits, too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, note
from benchmarks.published import PUBLISHED
from benchmarks.published.layouts.experts import (
    case_of,
    measured_seconds,
    published_choices,
    utilisation,
)
from benchmarks.searches.cases import cached_graph, label
from costmodel.table.rows.row_files import read_rows

MODELS = {
    "8b@8": ("LLAMA3-8B", 8),
    "70b@64": ("LLAMA3-70B", 64),
    "405b@1024": ("LLAMA3-405B", 1024),
}
"""Megatron-LM's runs of Llama 3 on H100 (`examples/llama/README.md`), by model and devices."""

PRECISIONS, EXECUTIONS = ("bf16", "fp8", "fp8-tensorwise"), ("ours-eager", "ours-compiled")
THEIRS, THEIR_PRECISION = "megatron-core", "fp8-tensorwise"


def beside_published(row: dict[str, str], rows: list[dict[str, str]], profile_name: str) -> dict:
    """Return our fastest plans of a row's model and batch, and all runs of the same."""
    from profiles import load_profile
    from search import SearchRequest, find_plan
    from search.report.explain import differences

    case, profile = case_of(row), load_profile(profile_name)
    asked = SearchRequest(num_devices=case.gpus, global_batch=case.global_batch)
    found: dict = {"model": row["model"], "gpus": case.gpus, "ours": {}, "runs": []}
    best = None
    for precision, execution in product(PRECISIONS, EXECUTIONS):
        graph = cached_graph(row["model"], case, precision)
        request = replace(asked, precision=precision, execution=execution)
        plan = find_plan(graph, profile, request).plan
        if plan is None:
            continue
        step_s = plan.estimate["step_s"]
        found["ours"][f"{precision} {execution}"] = {
            "step_s": step_s, "mfu": utilisation(row, step_s), "plan": label(plan),
        }  # fmt: skip
        if best is None or step_s < best.estimate["step_s"]:
            best = plan
    for run in rows:
        if _asked(run) == _asked(row) and run["gpu"].startswith("H100"):
            step_s = float(run["step_time_s"] or 0) or measured_seconds(run)
            found["runs"].append(
                {"source": run["source_id"], "dtype": run["dtype"], "step_s": step_s,
                 "mfu": utilisation(row, step_s)}
            )  # fmt: skip
    theirs = find_plan(
        cached_graph(row["model"], case, THEIR_PRECISION),
        profile,
        replace(asked, precision=THEIR_PRECISION, execution=THEIRS, **published_choices(row)),
    ).plan
    if theirs is not None and best is not None:
        found["their_layout_s"] = theirs.estimate["step_s"]
        found["parts_s"] = {
            name: round(given - ours, 3)
            for name, given, ours in differences(best.estimate, theirs.estimate)
            if abs(given - ours) > 0.005 * best.estimate["step_s"]
        }
    return found


def _asked(row: dict[str, str]) -> tuple[str, ...]:
    """What is trained, on how many devices and in which batch."""
    names = "layers", "hidden", "ffn_hidden", "gpus", "global_batch", "seq_len"
    return tuple(str(float(row[name] or 0)) for name in names)


@benchmark("fastest", quick={"models": ("8b@8",)})
def fastest(
    *,
    rows: Path = PUBLISHED / "measured.csv",
    models: Annotated[tuple[str, ...], "of these"] = tuple(MODELS),
    profile: str = "h100-sxm5-80gb",
) -> Result:
    every, answers = read_rows(rows), []
    for model in models:
        name, gpus = MODELS[model]
        row = next(
            row for row in every
            if row["model"] == name and row["source_id"] == "mlm_llama_readme"
            and int(float(row["gpus"])) == gpus
        )  # fmt: skip
        answers.append(beside_published(row, every, profile))
        note(answers[-1])
    return Result(answers)
