"""Of how many tokens a rank has logits at a time, where a search has them in chunks."""

from __future__ import annotations

from planner.language.lowering.passes.losses_in_chunks import CROSS_ENTROPY, rows_of_chunk
from search.stages.stage_table import StageTable


def logit_rows(table: StageTable) -> int:
    """Return of how many tokens at a time blocks had best make logits under a table's layouts; 0:
    of all, which are too few to be divided, or no loss is of logits alone.
    """
    if table.costs.execution.prices != "profile":
        return 0  # other runtimes have losses of their own
    found = 0
    for index, program in enumerate(table.graph.classes):
        if any(op.target == CROSS_ENTROPY for op in program.ops):
            layouts = tuple(layout for layout in table.layouts if layout.class_index == index)
            local = table.costs.local(index, table.microbatch_size, table.degrees, layouts)
            found = max(found, rows_of_chunk(local))
    return found
