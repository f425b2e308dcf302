"""Of how many tokens a rank has logits at a time, where a search has them in chunks."""

from __future__ import annotations

from costmodel import CostCache
from planner.errors import LayoutError
from planner.language.lowering.passes.losses_in_chunks import (
    is_of_a_product,
    most_logits,
    rows_of_chunk,
)
from profiles import Profile
from search.request import SearchRequest
from search.stages.stage_table import StageTable

LEAST_PART = 0.02
"""Of the memory that a plan is given, that logits in fp32 and their probabilities take: of less,
chunks bring too little for twice the tables, where a search has the choice."""
_LOGIT_BYTES = 8


def least_logit_bytes(request: SearchRequest, profile: Profile) -> float:
    """Return the bytes of whole logits from which on a search tries chunks: `LEAST_PART` of the
    limit that is given, else of a device's memory; none where chunks are asked for.
    """
    if request.logits == "chunked":
        return 0.0
    return LEAST_PART * (request.memory_limit_bytes or profile.cluster.memory_bytes)


def logit_rows(table: StageTable, *, least_bytes: float) -> int:
    """Return of how many tokens at a time blocks had best make logits under a table's layouts; 0:
    of all, which are too few to be divided or take less than `least_bytes`, or no loss is of logits
    alone.
    """
    if table.costs.execution.prices != "profile":
        return 0  # other runtimes have losses of their own
    found = 0
    for index in range(len(table.graph.classes)):
        if table.costs.has_loss(index):
            layouts = tuple(layout for layout in table.layouts if layout.class_index == index)
            local = table.costs.local(index, table.microbatch_size, table.degrees, layouts)
            if _LOGIT_BYTES * most_logits(local) >= least_bytes:
                found = max(found, rows_of_chunk(local))
    return found


def check_chunks(costs: CostCache) -> None:
    """Raise LayoutError where chunks are asked for, and plans can't have them."""
    if costs.execution.prices != "profile":
        raise LayoutError(
            f"`logits` chunked was given, and {costs.execution.name} has losses of its own; plan "
            "for this project's runtime, or leave it out"
        )
    if not any(is_of_a_product(program.bind(1)) for program in costs.graph.classes):
        raise LayoutError(
            "`logits` chunked was given, and no loss of the model is a cross entropy of what a "
            "linear layer makes for it alone; leave it out"
        )
