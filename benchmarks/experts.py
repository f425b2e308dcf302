"""The layouts that experts published beside our best, both under our own model.

    python benchmarks/experts.py DATA/measured.csv [--source sc21_t1 ...] [--json]

For each row: the model is captured at its sizes, the published degrees are fixed and the rest
searched, and then everything is searched. Prints by how much the published layout is slower
under the model, and through which parts; and by how much against the best layout that recomputes
as the published one does and has no more than ZeRO 1, as Megatron-LM had. Where that is more than
a few percent either the experts missed something or the model does, and the parts say where to
look.
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

SOURCES = ("sc21_t1", "mlm_llama_readme")
"""Megatron-LM's table of 1.7B to 1T (Narayanan et al. 2021, table 1), and its Llama 3 runs."""

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
    return chosen


def compare(row: dict[str, str]) -> dict[str, object]:
    """Search with and without a row's layout; return both and what lies between them."""
    from profiles import load_profile
    from search import SearchRequest, find_plan
    from search.explain import differences

    case = case_of(row)
    graph = cached_graph(row["model"], case)
    profile = load_profile(next(PROFILES[gpu] for gpu in PROFILES if row["gpu"].startswith(gpu)))
    free = SearchRequest(num_devices=case.gpus, global_batch=case.global_batch, precision="bf16")
    found = {"model": row["model"], "gpus": case.gpus, "source": row["source_id"]}
    best = find_plan(graph, profile, free)
    if best.plan is None:
        return found | {"best": best.reasons[0]}
    found |= {"best": label(best.plan), "best_s": best.plan.estimate["step_s"],
              "gap": best.certificate.gap}  # fmt: skip
    choices = published_choices(row)
    alike = replace(free, allow=(("zero", "0"), ("zero", "1")), recompute=choices.get("recompute"))
    same = find_plan(graph, profile, alike).plan
    found |= {"best_alike": label(same) if same else "nothing fits"}
    same_s = same.estimate["step_s"] if same else float("nan")
    theirs = find_plan(graph, profile, replace(free, **choices))
    if theirs.plan is None:
        least = theirs.leanest.estimate["peak_bytes"] / 2**30
        return found | {"published": f"needs {least:.1f} GiB of {profile.memory_bytes / 2**30:.1f}"}
    mine, other = best.plan.estimate, theirs.plan.estimate
    return found | {
        "published": label(theirs.plan),
        "published_s": other["step_s"],
        "slower_percent": 100 * (other["step_s"] / mine["step_s"] - 1),
        "slower_percent_alike": 100 * (other["step_s"] / same_s - 1),
        "parts_s": {
            name: given - ours
            for name, given, ours in differences(other, mine)
            if abs(given - ours) > 0.01 * mine["step_s"]
        },
    }


def label(plan) -> str:
    """Return a plan's degrees and choices in a line."""
    recompute = "/".join(sorted({stage.recompute for stage in plan.stages}))
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
        one = answers[-1]
        if not options.json:
            slower = one.get("slower_percent")
            verdict = f"{slower:5.1f}% slower" if slower is not None else "not comparable"
            parts = ", ".join(f"{k} {v:+.3f} s" for k, v in one.get("parts_s", {}).items())
            print(
                f"{one['model']:12} {one['gpus']:5} GPUs  {verdict}: {one.get('published')} | "
                f"ours {one['best']} (gap {one.get('gap', 0):.1%})  [{parts}]  "
                f"{one.get('slower_percent_alike', 0.0):.1f}% slower than ours with "
                f"the same recompute and ZeRO 0 or 1: {one.get('best_alike')}",
                flush=True,
            )
    if options.json:
        print(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
