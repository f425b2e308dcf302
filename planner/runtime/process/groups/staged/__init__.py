"""A backend that holds ranks to NCCL's rules without NCCL: on CPUs, or several ranks on one GPU.

Tensors of a GPU go through the host, and gloo carries them. What a run relies on is NCCL's:

    order        A communicator runs what it is given in the order it was given, whatever it is, and
                 each operation ends before the next begins. There are no tags.
    meeting      A send ends when its receive has taken it. What is given `at_once` runs at once.
    waiting      No call waits but the first between two ranks, or of all ranks, which connects
                 them: there each host waits for the others.
    types        Complex numbers and 16-bit integers are refused, except where NCCL takes complex
                 numbers as pairs of real ones.

A run that can't go on ends after the group's timeout with what all ranks have given their
communicators. A GPU's stream does not wait by itself: the host waits for it, in `wait`. With NCCL,
too, nothing that is given after a wait begins before it is over.

Set PLANNER_BACKEND to "staged" and all of a plan's ranks use it (`planner.runtime.process.device`).
Read `queue` first, then `host` and `group`.
"""

from planner.runtime.process.groups.staged.group import NAME, Staged, register
from planner.runtime.process.groups.staged.queue import Stuck

__all__ = ["NAME", "Staged", "Stuck", "register"]
