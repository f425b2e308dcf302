import sys, time, faulthandler
import tests.spawn as spawn
spawn.PATIENCE_S = 100
from tests.runtime import test_fp16 as t
import math
CASES = {
 "pp2": ({"pp": 2, "num_microbatches": 4}, "rank", None),
 "dp2": ({"dp": 2, "num_microbatches": 3}, "batch", math.inf),
 "dp1": ({"dp": 1, "num_microbatches": 3}, "batch", math.inf),
 "dp2r": ({"dp": 2, "num_microbatches": 1}, "rank", None),
 "z1": ({"dp": 2, "num_microbatches": 3, "zero_stage": 1}, "rank", math.inf),
 "z3": ({"dp": 2, "num_microbatches": 3, "zero_stage": 3}, "rank", None),
 "tp2": ({"tp": 2, "num_microbatches": 2}, "rank", math.inf),
}
def train(plans):
    faulthandler.dump_traceback_later(60, exit=False)
    return t.train(plans)
if __name__ == "__main__":
    for name in sys.argv[2:]:
        choices, *how = CASES[name]
        start = time.time()
        plan = t.plan_for(**choices)
        print(name, "plan", time.time() - start, flush=True)
        for seen in spawn.run_ranks(train, int(sys.argv[1]), [(plan, *how)]):
            print(seen, time.time() - start, flush=True)
