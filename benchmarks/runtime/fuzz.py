"""Fuzz the sharding rules: random small models under random placements, on simulated ranks.

Each case is checked, values and gradients, against one device in double precision, once with
ops drawn at random recomputed in the backward. Tells the seeds that fail; run one again with
--cases 1 --first-seed SEED. Exit code 1 on any.
"""

from __future__ import annotations

import time
import traceback

from benchmarks.harness import Result, benchmark, note
from tests.sharding.test_fuzz import fuzz as run_case


@benchmark("fuzz", quick={"cases": 2})
def fuzz(*, cases: int = 500, first_seed: int = 1000) -> Result:
    start_s = time.perf_counter()
    failed = []
    for seed in range(first_seed, first_seed + cases):
        try:
            run_case(seed)
        except Exception:
            failed.append(seed)
            traceback.print_exc(limit=-3)
            note(f"seed {seed} failed")
    row = {"cases": cases, "first_seed": first_seed, "mismatches": len(failed)}
    row["seconds"] = time.perf_counter() - start_s
    return Result([row], [f"seed {seed} failed" for seed in failed], failed=bool(failed))
