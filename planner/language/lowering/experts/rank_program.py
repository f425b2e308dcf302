"""What a rank of ep runs for a block: in which form rows and experts come together."""

from __future__ import annotations

from planner.language.graph import Program
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.redistribute import EXCHANGE_ROWS, GATHER_ROWS
from planner.language.lowering.experts.gather import Gathering, is_gathered
from planner.language.lowering.experts.spread import Spreading
from planner.language.lowering.experts.weights import check_placed, expert_params, takes_runs


def spread_params(program: Program) -> frozenset[str]:
    """Return the parameters of a rank's program that lie on the experts' mesh."""
    is_spread = any(op.target in (EXCHANGE_ROWS, GATHER_ROWS) for op in program.ops)
    return expert_params(program) if is_spread else frozenset()


def spread_experts(
    program: Program,
    ep: int,
    *,
    etp: int = 1,
    fullest: float = 1.0,
    layout: ClassLayout | None = None,
) -> Program:
    """Return what a rank of `ep` runs for a bound program; without experts the program. `layout` is
    the block's on ep: without one rows are exchanged.

    Its rows, inside, are as many as the rank has that gets `fullest` times the mean: how many a
    step brings is known by the step alone. Raises LayoutError where experts do not divide, or rows
    meet others inside that are not exchanged with them.
    """
    taking = [op for op in program.ops if takes_runs(op)]
    if ep == 1 or not taking:
        return program
    check_placed(program, f"ep={ep} etp={etp}")
    form = Gathering if is_gathered(layout) else Spreading
    return form(program, ep, etp, fullest).run(taking)
