"""How long a search takes: wall time and memory after capture, on one core.

    python benchmarks/search.py [--json] [--case NAME ...] [--profile h100-sxm5-80gb]
                                [--execution ours-eager]

Each case runs in a process of its own, so that peak memory is its own; the model is captured
before the clock starts (and kept in the capture cache). `search_growth.py` tells how the time
grows with devices, layers and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph

# This file's folder comes first on the path, and would hide the package `search` behind it.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model by its sizes (Llama's, or GPT-2's where kv_heads is 0), and what is asked."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    gpus: int
    global_batch: int
    goal_s: float
    memory_limit_gib: float | None = None


CASES = {
    "llama3-8b@8": Case(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, seq_len=4096,
        gpus=8, global_batch=64, goal_s=0.5,
    ),
    "llama3-70b@64": Case(
        layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, seq_len=8192,
        gpus=64, global_batch=512, goal_s=1.0,
    ),
    "gpt3-175b@1024": Case(
        layers=96, hidden=12288, ffn=49152, heads=96, kv_heads=0, vocab=51200, seq_len=2048,
        gpus=1024, global_batch=1536, goal_s=3.0,
    ),
    "llama3-405b@16384": Case(
        layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256, seq_len=8192,
        gpus=16384, global_batch=2048, goal_s=8.0,
    ),
    "1000-layer@512": Case(
        layers=1000, hidden=1024, ffn=4096, heads=16, kv_heads=16, vocab=32000, seq_len=1024,
        gpus=512, global_batch=1024, goal_s=3.0,
    ),
}  # fmt: skip


def capture(case: Case):
    """Return the case's graph, captured on the meta device in bfloat16."""
    import torch
    import transformers

    from planner.capture import capture_module

    if case.kv_heads:
        config = transformers.LlamaConfig(
            vocab_size=case.vocab,
            hidden_size=case.hidden,
            intermediate_size=case.ffn,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            max_position_embeddings=case.seq_len,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=case.vocab,
            n_embd=case.hidden,
            n_inner=case.ffn,
            n_layer=case.layers,
            n_head=case.heads,
            n_positions=case.seq_len,
        )
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)

    def batch(size: int) -> dict:
        ids = torch.zeros(size, case.seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return capture_module(module, batch(2), batch(3), name=f"{case.layers}x{case.hidden}")


def cached_graph(name: str, case: Case):
    """Return the graph, from the cache folder when it was captured before."""
    from hashlib import sha256

    asked = ("gpus", "global_batch", "goal_s")
    model = asdict(replace(case, memory_limit_gib=None))
    sizes = {name: value for name, value in model.items() if name not in asked}
    digest = sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]
    return kept_graph(digest, lambda: capture(case))


def kept_graph(name: str, make: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of that name, from the cache folder when it was made before."""
    from planner.language.graph import from_json, to_json

    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = root / "planner" / "benchmarks" / f"{name}.json"
    if path.exists():
        return from_json(json.loads(path.read_text()))
    graph = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(to_json(graph)))
    os.replace(scratch, path)
    return graph


def peak_rss_mib() -> int:
    """Return the most memory that this program held.

    Not `ru_maxrss`, which begins with what the parent held: that has captured models.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def run_case(name: str, case: Case, profile_name: str, execution: str = "ours-eager") -> dict:
    """Search once and return the row; meant for a process of its own."""
    graph = cached_graph(name, case)
    from planner.units import GIB
    from profiles import load_profile
    from search import SearchRequest, find_plan

    profile = load_profile(profile_name)
    limit = case.memory_limit_gib
    request = SearchRequest(
        num_devices=case.gpus,
        global_batch=case.global_batch,
        memory_limit_bytes=int(limit * GIB) if limit else None,
        execution=execution,
    )
    started, cpu = time.perf_counter(), time.process_time()
    result = find_plan(graph, profile, request)
    search_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    certificate, plan = result.certificate, result.plan
    row = {
        "case": name,
        "search_s": round(search_s, 3),
        "cpu_s": round(cpu_s, 3),
        "goal_s": case.goal_s,
        "peak_rss_mib": peak_rss_mib(),
        "gap": certificate.gap if certificate else None,
        "candidates": certificate.considered if certificate else None,
        "simulated": certificate.evaluated if certificate else None,
    }
    if plan is not None:
        row["step_s"] = plan.estimate["step_s"]
        row["plan"] = (
            f"dp{plan.dp} tp{plan.tp} pp{plan.pp} vpp{plan.vpp} mbs{plan.microbatch_size}"
            f"x{plan.num_microbatches} {plan.schedule} zero{plan.zero_stage}"
        )
    else:
        row["plan"] = result.reasons[0]
    return row


def in_own_process(script: str, *arguments: str) -> dict:
    """Return the row that a script prints last, run in a process of its own after capture."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def describe(row: dict) -> str:
    """Return a row's line."""
    goal = f", goal {row['goal_s']} s" if row["goal_s"] else ""
    return (
        f"{row['case']:28} {row['search_s']:8.2f} s ({row['cpu_s']:.2f} s of CPU{goal})  "
        f"{row['peak_rss_mib']:5} MiB  gap {row['gap']}  "
        f"{row['candidates']} configurations, {row['simulated']} simulated: {row['plan']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--case", action="append", help="run only these")
    parser.add_argument("--profile", default="h100-sxm5-80gb")
    parser.add_argument("--execution", default="ours-eager", help="the runtime that trains")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case = CASES[options.one]
        print(json.dumps(run_case(options.one, case, options.profile, options.execution)))
        return
    rows = []
    for name in options.case or CASES:
        cached_graph(name, CASES[name])
        asked = "--profile", options.profile, "--execution", options.execution
        rows.append(in_own_process(__file__, "--one", name, *asked))
        if not options.json:
            print(describe(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
