"""What a machine has to have for a training, checked on this node alone: `diagnose`.

Out goes a `Finding` for each check: what was found, whether it is in order, and what to do. Read
`finding` (the record), then the checks: `software` (Python, PyTorch, libraries by the versions that
planner declares), `machine` (cores, memory, shared memory, limits, disk, clock), `devices`
(accelerators and their backend), `network` (this host's own address, links), `pair` (two ranks that
exchange). Nothing is changed and no GPU memory stays taken. Several nodes are checked against each
other by a preflight with a plan (`planner.runtime.preflight`).
"""

from planner.doctor.diagnose import diagnose
from planner.doctor.finding import Finding

__all__ = ["Finding", "diagnose"]
