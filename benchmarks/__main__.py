"""The command: ``python -m benchmarks NAME [--quick] [--json]``."""

import os
import sys

# One thread a process, as ranks have: set before any library that starts threads is imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

if __name__ == "__main__":
    from benchmarks.harness import main

    sys.exit(main())
