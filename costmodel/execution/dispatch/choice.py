"""The dispatchers that a runtime may exchange a block's rows with."""

from __future__ import annotations

from collections.abc import Mapping

from costmodel.execution.dispatch.dispatcher import Dispatcher, find_dispatcher
from costmodel.execution.dispatch.exchange import exchanges_of
from costmodel.execution.execution import Execution
from costmodel.topology import Axis
from planner.language.graph import Program
from planner.language.layout.redistribute import GATHER_ROWS

GATHERED = "gathered-rows"
"""The dispatcher of blocks whose layout on ep says that tokens are gathered."""


def gathers(local: Program) -> bool:
    """Whether a rank's program gathers tokens."""
    return any(op.target == GATHER_ROWS for op in local.ops)


def may_gather(execution: Execution) -> bool:
    """Whether a runtime has both forms of exchanges."""
    return GATHERED in execution.dispatchers


def dispatchers_of(
    execution: Execution, local: Program, device: str, axes: Mapping[str, Axis]
) -> tuple[Dispatcher, ...]:
    """Return the dispatchers of a runtime that exchange a rank's program's rows on a device; of a
    program without exchanges the runtime's first. What gathers tokens is another program.

    A run that has one dispatcher alone is taken at its word.
    """
    if gathers(local):
        return (find_dispatcher(GATHERED),)
    found = tuple(find_dispatcher(name) for name in execution.dispatchers if name != GATHERED)
    ranks = axes["ep"].size
    if len(found) == 1 or ranks == 1 or not exchanges_of(local):
        return found[:1]
    return tuple(each for each in found if each.runs(device, ranks)) or found[:1]
