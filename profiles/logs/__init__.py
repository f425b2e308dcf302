"""Logs and traces of the stacks that people run, as what a step took.

In: a file that a training run of another system left: its log, or a trace of torch.profiler. Out: a
`RunLog`: what the readings say of a step, memory at its fullest, and of a trace the parts of a
step. A format is one module with one `LogFormat`, listed in `reading.FORMATS`; it has a pattern of
the lines it reads and says in which unit they are.

Read `record` first (what comes out, and which readings count), then `reading` (which format a file
is of).
"""

from profiles.logs.reading import find_log, read_log
from profiles.logs.record import RunLog, Steady, StepParts, Unit

__all__ = ["RunLog", "Steady", "StepParts", "Unit", "find_log", "read_log"]
