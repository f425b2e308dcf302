"""The layouts that experts published beside our best, both under our own model.

For each row: the model is captured at its sizes, the published degrees are fixed and the rest
searched, and then everything is searched. Prints by how much the published layout is slower
under the model, and through which parts; and by how much against the best layout by the means
its authors had: their recompute, their ZeRO stage (0 or 1 where the row does not say), 1F1B plain
or interleaved. Where that is more than
a few percent either the experts missed something or the model does, and the parts say where to
look: beside the captured graph's price of the published layout stand what was measured, and what
the estimator of rows says, which knows the kernels that the run was made with. MFU is the model's
own work (attention in full, nothing recomputed) over the devices' bf16 peak.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, note
from benchmarks.published import PUBLISHED
from benchmarks.searches.cases import Case, cached_graph, label
from costmodel.table.rows.model_counts import ModelCounts
from costmodel.table.rows.row_files import read_rows
from planner.units import TFLOP

SOURCES = ("sc21_t1", "mlm_llama_readme")
"""Megatron-LM's table of 1.7B to 1T (Narayanan et al. 2021, table 1), and its Llama 3 runs."""

THEIR_SCHEDULES = (("schedule", "1f1b"), ("schedule", "interleaved_1f1b"))

PROFILES = {"A100": "a100-sxm4-80gb", "H100": "h100-sxm5-80gb"}


def case_of(row: dict[str, str]) -> Case:
    """Return a row's model and question."""
    kv_heads = int(float(row["kv_heads"] or 0))
    gated = row["gated_ffn"] not in ("", "0", "0.0")
    return Case(
        layers=_number(row, "layers"),
        hidden=_number(row, "hidden"),
        ffn=_number(row, "ffn_hidden"),
        heads=_number(row, "heads"),
        kv_heads=kv_heads if gated else 0,
        vocab=_number(row, "vocab"),
        seq_len=_number(row, "seq_len"),
        gpus=_number(row, "gpus"),
        global_batch=_number(row, "global_batch"),
        goal_s=0.0,
    )


def published_choices(row: dict[str, str]) -> dict[str, object]:
    """Return what a row fixes."""
    names = {"dp": "dp", "cp": "cp", "tp": "tp", "pp": "pp", "micro_batch": "microbatch_size"}
    chosen: dict[str, object] = {ours: _number(row, theirs) for theirs, ours in names.items()}
    vpp = _number(row, "vpp") if row["vpp"] else 1
    if vpp > 1:
        chosen |= {"vpp": vpp, "schedule": "interleaved_1f1b"}
    elif chosen["pp"] != 1:
        chosen |= {"vpp": 1, "schedule": "1f1b"}
    if row["recompute"] in ("none", "full", "selective"):
        chosen["recompute"] = row["recompute"]
    if row["zero_stage"]:
        chosen["zero"] = _number(row, "zero_stage")
    return chosen


def compare(row: dict[str, str]) -> dict[str, object]:
    """Search with and without a row's layout; return both and what lies between them."""
    from costmodel.table.rows.rows import predict_row
    from profiles import load_profile
    from search import SearchRequest, find_plan
    from search.report.explain import differences

    case = case_of(row)
    graph = cached_graph(row["model"], case)
    profile = load_profile(next(PROFILES[gpu] for gpu in PROFILES if row["gpu"].startswith(gpu)))
    free = SearchRequest(num_devices=case.gpus, global_batch=case.global_batch, precision="bf16")
    # As a row it is priced with the kernels of its own stack, but in what we search in.
    of_row = float(predict_row({**row, "dtype": "bf16"})["predicted_step_time_s"])
    found = {
        "model": row["model"],
        "gpus": case.gpus,
        "source": row["source_id"],
        "measured_s": measured_seconds(row),
        "measured_in": row["dtype"],
        "row_s": of_row,
        "measured_mfu": utilisation(row, measured_seconds(row)),
    }
    best = find_plan(graph, profile, free)
    if best.plan is None:
        return found | {"best": best.reasons[0]}
    mine = best.plan.estimate
    found |= {"best": label(best.plan), "best_s": mine["step_s"], "gap": best.certificate.gap,
              "best_mfu": utilisation(row, mine["step_s"])}  # fmt: skip
    choices = published_choices(row)
    alike = replace(
        free,
        zero=choices.get("zero"),
        recompute=choices.get("recompute"),
        allow=tuple(("zero", z) for z in ("0", "1") if "zero" not in choices) + THEIR_SCHEDULES,
    )
    same = find_plan(graph, profile, alike).plan
    found |= {"best_alike": label(same) if same else "nothing fits"}
    same_s = same.estimate["step_s"] if same else float("nan")
    theirs = find_plan(graph, profile, replace(free, **choices))
    if theirs.plan is None:
        least = theirs.leanest.estimate["peak_bytes"] / 2**30
        return found | {"published": f"needs {least:.1f} GiB of {profile.memory_bytes / 2**30:.1f}"}
    other = theirs.plan.estimate
    return found | {
        "published": label(theirs.plan),
        "published_s": other["step_s"],
        "published_mfu": utilisation(row, other["step_s"]),
        "slower_percent": 100 * (other["step_s"] / mine["step_s"] - 1),
        "slower_percent_alike": 100 * (other["step_s"] / same_s - 1),
        "parts_s": {
            name: given - ours
            for name, given, ours in differences(other, mine)
            if abs(given - ours) > 0.01 * mine["step_s"]
        },
    }


def measured_seconds(row: dict[str, str]) -> float:
    """Return the published step time; where rates are of all work done, what is recomputed is
    in them (Narayanan et al. 2021, equation 3).
    """
    batch, gpus = _number(row, "global_batch"), _number(row, "gpus")
    if row["tokens_per_s_per_gpu"]:
        return batch * _number(row, "seq_len") / gpus / float(row["tokens_per_s_per_gpu"])
    h, s = _number(row, "hidden"), _number(row, "seq_len")
    layers, vocab = _number(row, "layers"), _number(row, "vocab")
    flop = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flop / gpus / (float(row["tflops_per_gpu"]) * TFLOP)


def utilisation(row: dict[str, str], step_s: float) -> float:
    """Return the model's own work, attention in full, over what the devices could do in bf16."""
    from costmodel.table.rows.rows import machine_of
    from costmodel.table.rows.run_row import parse_row

    peak = machine_of(row)[1].peak_flop_per_s["bfloat16"]
    flop = _number(row, "global_batch") * ModelCounts(parse_row(row).sizes).model_flop()
    return flop / (step_s * _number(row, "gpus") * peak)


def _number(row: dict[str, str], name: str) -> int:
    return int(float(row[name]))


@benchmark("experts", quick={"models": ("GPT-1.7B",), "sources": ("sc21_t1",)})
def experts(
    *,
    rows: Path = PUBLISHED / "measured.csv",
    sources: tuple[str, ...] = SOURCES,
    models: Annotated[tuple[str, ...], "only these"] = (),
) -> Result:
    answers = []
    for row in read_rows(rows):
        if row["source_id"] in sources and (not models or row["model"] in models):
            answers.append(compare(row))
            note(answers[-1])
    return Result(answers)
