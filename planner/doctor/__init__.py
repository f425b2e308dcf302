"""What a machine has to have for a training, checked on this node alone: `diagnose`.

Out goes a `Check` (`planner.nodes.check`) for each: what was found, whether it is in order, and
what to do. Read the checks: `software` (Python, PyTorch, libraries by the versions that
planner declares), `machine` (cores, memory, shared memory, limits, disk, clock), `devices`
(accelerators and their backend), `network` (this host's own address, links), `pair` (two ranks that
exchange). Nothing is changed and no GPU memory stays taken. Several nodes are checked against each
other by a preflight with a plan (`planner.runtime.preflight`).
"""

from planner.doctor.diagnose import diagnose

__all__ = ["diagnose"]
