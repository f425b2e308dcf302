"""Which tables of stages a search keeps of one mesh of a replica and microbatch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from costmodel.memory.bound import kept_bytes
from search.stages.stage_table import StageTable


def microbatch_seconds(table: StageTable) -> float:
    """Return the seconds of a microbatch through all blocks, forward and backward."""
    return float((table.forward_s + table.backward_s).sum())


def worth_trying(tables: Iterable[StageTable]) -> tuple[StageTable, ...]:
    """Return the tables that are not slower than another without holding clearly less.

    The layout solver counts bytes roughly; these are the cost model's own. What waits for a
    collective is not in a block's load, nor what a loss holds while it runs, so tables are held
    against those that are alike in both.
    """
    kept_of: defaultdict[tuple[bool, bool], list[tuple[float, float, float]]] = defaultdict(list)
    result = []

    for table in sorted(tables, key=microbatch_seconds):
        load, kept = table.blocks, kept_of[table.beside, table.logit_rows > 0]
        mine = (
            float(load.param_bytes.sum()),
            float(kept_bytes(load, recompute="none").sum()),
            float(kept_bytes(load, recompute="full").sum()),
        )
        # Slower than all that are kept: it has to hold clearly less than each in one part at least.
        if not kept or any(
            all(size < 0.98 * other[part] for other in kept) for part, size in enumerate(mine)
        ):
            kept.append(mine)
            result.append(table)
    return tuple(result)
