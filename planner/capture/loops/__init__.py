"""Loops over experts, written with rows that are picked by values: told in sorted runs of rows.

Comes in: a module whose forward goes through its experts one by one, and picks for each the rows
that a router chose for it. No graph holds that: how many rows there are depends on values. Goes
out: rows in the order of their experts, products of runs and their sums, which compute the same
(`planner.language.ops.families.entries.routing`). What is not recognised runs as it is
(`planner.capture.opaque`).

- `tracing` runs such a forward as if each expert had rows;
- `masks` says whose rows a mask of the trace picks, and in which order;
- `chains` puts what is done for each expert side by side;
- `fuse` writes one course for all of them.
"""

from planner.capture.loops.chains import Unlike
from planner.capture.loops.fuse import with_told_loops

__all__ = ["Unlike", "with_told_loops"]
