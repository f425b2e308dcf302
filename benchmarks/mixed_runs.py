"""Sailor's measured runs on GH200s: how well layouts of one model on as many devices are ranked.

    python benchmarks/mixed_runs.py [rows.csv] [--json]

Each row of `hetero_runs.csv` becomes a plan with the stages it names, and is priced by `estimate`
as Megatron-DeepSpeed without fused attention. Left out, as the cost model cannot say it: pipelines
of RTX 3090, RTX 2080 and Titan RTX together (an estimate is of one kind of device), replicas of a
stage on several kinds, and rows whose step time is the copy of another cell. Rows do not tell the
dtype, the recomputation and the version of the code, so ranks are of more worth than errors.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from accuracy_groups import kendall_tau

from costmodel.cache import CostCache
from costmodel.estimate import estimate_time
from costmodel.execution.executed import ExecutedProfile
from costmodel.table.rows.row_plan import plan_of, transformer_of
from costmodel.table.rows.rows import run_of
from planner.errors import PlannerError
from planner.plan import Plan
from planner.templates import build_transformer
from profiles import Profile

DEFAULT_ROWS = Path(__file__).resolve().parents[2] / "shared/data/published/hetero_runs.csv"
DEVICES_PER_NODE = 4
MODELS = {
    "OPT-350": {"layers": "24", "hidden": "1024", "heads": "16", "vocab": "50272"},
    "GPT-NEO": {"layers": "32", "hidden": "2560", "heads": "20", "vocab": "50257"},
}
"""Configurations of facebook/opt-350m and EleutherAI/gpt-neo-2.7B."""

EXPRESSED = "GH-96"


def refusal(row: Mapping[str, str]) -> str | None:
    """Return why a row is not priced, or nothing."""
    if set(row["gpu_types"].replace("+", "|").split("|")) != {EXPRESSED}:
        return "several kinds of devices"
    if row["iteration_s"] == row["grad_allreduce_s"]:
        return "its step time is that of its all-reduce"
    blocks = sum(int(number) for number in row["layers_per_stage"].split("|"))
    if blocks != int(MODELS[row["model"]]["layers"]) + 2:
        return "its stages are not the model's layers with embedding and head"
    return None


def step_seconds(row: Mapping[str, str]) -> float:
    """Return the estimated step of a row."""
    said = {
        **MODELS[row["model"]],
        "stack": "megatron-classic",
        "gpu": "GH200",
        "gpus": row["gpus"],
        "seq_len": "2048",
        "dtype": "fp16",
        "zero_stage": "0",
        "recompute": "none",
        "tp": row["tp"].partition("|")[0],
        "pp": row["pp"],
        "dp": row["dp"].partition("|")[0],
        "vpp": "1",
        "micro_batch": row["micro_batch"],
        "global_batch": row["global_batch"],
    }
    run, profile, rates = run_of(said)
    cluster = profile.file.cluster.model_copy(update={"devices_per_node": DEVICES_PER_NODE})
    profile = Profile(profile.file.model_copy(update={"cluster": cluster}))
    model = transformer_of(run)
    plan = _with_stages(
        plan_of(run, model, devices_per_node=DEVICES_PER_NODE),
        [int(number) for number in row["layers_per_stage"].split("|")],
    )
    nodes = -(-run.gpus // DEVICES_PER_NODE)
    executed = ExecutedProfile(profile, rates, num_nodes=nodes, execution=run.stack)
    return estimate_time(plan, CostCache(build_transformer(model), executed)).step_s


def _with_stages(plan: Plan, blocks: list[int]) -> Plan:
    """Return a plan whose stages have so many blocks."""
    ends = np.cumsum(blocks)
    stages = tuple(
        stage.model_copy(update={"first_block": int(end - size), "last_block": int(end - 1)})
        for stage, end, size in zip(plan.stages, ends, blocks, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT_ROWS)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    refused: dict[str, int] = defaultdict(int)
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    try:
        with options.rows.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if (why := refusal(row)) is not None:
                    refused[why] += 1
                    continue
                key = row["branch"], row["model"], row["gpus"], row["global_batch"]
                groups[key].append((step_seconds(row), float(row["iteration_s"])))
    except (OSError, PlannerError) as error:
        print(error, file=sys.stderr)
        return 2
    lines = []
    for (branch, model, gpus, batch), pairs in groups.items():
        predicted, measured = np.array(pairs).T
        ranked = len(pairs) > 1
        lines.append(
            {
                "branch": branch,
                "model": model,
                "gpus": int(gpus),
                "batch": int(batch),
                "layouts": len(pairs),
                "kendall_tau": kendall_tau(predicted, measured) if ranked else None,
                "regret_pct": 100 * float(measured[predicted.argmin()] / measured.min() - 1)
                if ranked
                else None,
                "median_ratio": float(np.median(predicted / measured)),
            }
        )
    if options.json:
        print(json.dumps({"lines": lines, "refused": refused}, indent=1))
        return 0
    print(f"{'branch':12}{'model':10}{'gpus':>6}{'batch':>7}{'layouts':>9}{'tau':>7}{'regret':>9}"
          f"{'predicted / measured':>22}")  # fmt: skip
    for line in lines:
        branch, model, gpus, batch, layouts, tau, regret, ratio = line.values()
        texts = ["-" if tau is None else f"{tau:.2f}", "-" if regret is None else f"{regret:.1f}%"]
        print(f"{branch:12}{model:10}{gpus:6}{batch:7}{layouts:9}{texts[0]:>7}{texts[1]:>9}"
              f"{ratio:22.2f}")  # fmt: skip
    for why, count in sorted(refused.items()):
        print(f"not priced: {count:3}  {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
