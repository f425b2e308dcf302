"""The layouts that experts published beside our best, both under our own model.

    python benchmarks/experts.py DATA/measured.csv [--source sc21_t1 ...] [--json]

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

import argparse
import csv
import json
import os
import sys
from dataclasses import replace

# This file's folder comes first on the path, and would hide the package `search` behind it.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

from benchmarks.search import Case, cached_graph  # noqa: E402
from planner.units import TFLOP  # noqa: E402

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
    flop = _number(row, "global_batch") * parse_row(row).shape.model_flop()
    return flop / (step_s * _number(row, "gpus") * peak)


def describe(row: dict[str, object]) -> str:
    """Return a row's lines: the layouts, the three times of the published one, the parts."""
    lines = [
        f"{row['model']}, {row['gpus']} GPUs ({row['source']})",
        f"  measured   {row['measured_s']:7.2f} s in {row['measured_in']}, "
        f"MFU {row['measured_mfu']:.0%}; priced as a row in bf16 {row['row_s']:.2f} s",
    ]
    if "published_s" in row:
        lines.append(
            f"  published  {row['published_s']:7.2f} s, MFU {row['published_mfu']:.0%}: "
            f"{row['published']}, {row['slower_percent']:.0f}% slower than our best, "
            f"{row['slower_percent_alike']:.0f}% slower than our best by their means: "
            f"{row['best_alike']}"
        )
        parts = ", ".join(f"{k} {v:+.2f} s" for k, v in row["parts_s"].items())
        lines.append(f"             slower by {parts}")
    if "best_s" in row:
        lines.append(
            f"  our best   {row['best_s']:7.2f} s, MFU {row['best_mfu']:.0%}, "
            f"gap {row['gap']:.1%}: {row['best']}"
        )
    return "\n".join(lines)


def label(plan) -> str:
    """Return a plan's degrees and choices in a line."""
    recompute = "/".join(sorted(set(plan.recompute_by_block)))
    return (
        f"dp{plan.dp} cp{plan.cp} tp{plan.tp} pp{plan.pp} vpp{plan.vpp} "
        f"mbs{plan.microbatch_size}x{plan.num_microbatches} {plan.schedule} "
        f"zero{plan.zero_stage} {recompute}"
    )


def _number(row: dict[str, str], name: str) -> int:
    return int(float(row[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", help="measured.csv of published runs")
    parser.add_argument("--source", action="append", help=f"default: {', '.join(SOURCES)}")
    parser.add_argument("--model", action="append", help="only these")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    with open(options.measured, newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["source_id"] in (options.source or SOURCES)
            and (not options.model or row["model"] in options.model)
        ]
    answers = []
    for row in rows:
        answers.append(compare(row))
        row = answers[-1]
        if not options.json:
            print(describe(row), flush=True)
    if options.json:
        print(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
