"""Faults of blocks with experts whose rows each rank routes itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from planner.language.graph import Program
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.runtime.stage.calls import local_ops

_sort, _unsort = local_ops.sort_rows, local_ops.unsort_rows


def ends_of_all_rows(
    rows: Tensor, experts: Tensor, number: int, stable: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs end where they would if this rank's rows were those of two."""
    made, order, ends = _sort(rows, experts, number, stable)
    return made, order, 2 * ends


def in_the_order_of_experts(
    rows: Tensor, order: Tensor, weights: Tensor | None, copies: int
) -> Tensor:
    """Rows are weighted and summed as they lie after the experts."""
    return _unsort(rows, torch.arange(len(order)), weights, copies)


def router_without_its_sum(program: Program) -> Program:
    """A rank's part of the gradient of a whole router stays its own."""
    routers = [name for name in program.params if "router" in program.tensor[name].fqn]
    ops = [
        replace(op, args=(*op.args[:4], False))
        if op.target == REDISTRIBUTE and op.inputs[0] in routers
        else op
        for op in program.ops
    ]
    return replace(program, ops=tuple(ops))
