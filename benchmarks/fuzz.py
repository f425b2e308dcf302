"""Fuzz the sharding rules: random small models under random placements, on simulated ranks.

    python benchmarks/fuzz.py [--cases 500] [--first-seed 1000]

Each case is checked, values and gradients, against one device in double precision, once with
ops drawn at random recomputed in the backward. Prints
the seeds that fail; run one again with --cases 1 --first-seed SEED. Exit code 1 on any.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sharding.test_fuzz import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=1000)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.cases)
    start = time.perf_counter()
    failed = []
    for seed in seeds:
        try:
            fuzz(seed)
        except Exception:
            failed.append(seed)
            traceback.print_exc(limit=-3)
            print(f"seed {seed} failed", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{len(seeds)} cases, seeds {seeds[0]}-{seeds[-1]}, {len(failed)} mismatches "
        f"{failed or ''} in {seconds:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
