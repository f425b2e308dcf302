"""How long a search takes: wall time and memory after capture, on one core.

Each case runs in a process of its own, so that peak memory is its own; the model is captured
before the clock starts (and kept in the capture cache). `search_growth` tells how the time
grows with devices, layers and memory.
"""

from __future__ import annotations

import time
from typing import Annotated

from benchmarks.harness import Result, benchmark, in_own_process, note
from benchmarks.searches.cases import CASES, TINY, Case, cached_graph, label, peak_rss_mib
from planner.units import GIB
from profiles import load_profile
from search import SearchRequest, find_plan

H100, OURS = "h100-sxm5-80gb", "ours-eager"


@benchmark("search", quick={"cases": (TINY,)})
def search(
    *,
    cases: tuple[str, ...] = tuple(name for name in CASES if name != TINY),
    profile: str = H100,
    execution: Annotated[str, "the runtime that trains"] = OURS,
) -> Result:
    rows = []
    for name in cases:
        rows.append(searched(name, CASES[name], profile, execution))
        note(rows[-1])
    return Result(rows)


def searched(name: str, case: Case, profile: str, execution: str = OURS) -> dict:
    """Return the row of one case, captured here and searched in a process of its own."""
    cached_graph(name, case)
    return in_own_process(run_case, name, case, profile, execution)


def run_case(name: str, case: Case, profile_name: str, execution: str = OURS) -> dict:
    """Search once and return the row; meant for a process of its own."""
    graph = cached_graph(name, case)
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
        row["plan"] = label(plan)
    else:
        row["plan"] = result.reasons[0]
    return row
