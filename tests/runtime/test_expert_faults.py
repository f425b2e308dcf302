"""N6: each fault put into how experts and their rows are spread over ranks is found.

`verify` shows those of experts on ranks of their own: how many rows ranks exchange follows from
values, which a proof by blocks does not have. That proof has those of rows that a rank routes
itself, in `tests/runtime/check/by_block/test_routing_faults.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from planner.language.graph import from_json, to_json
from planner.language.layout.placements import Placements
from planner.language.layout.sharing import Sharing
from planner.language.plan import Plan
from planner.runtime.process import collectives
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from planner.runtime.stage import program_fx, programs
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.calls.exchanges import experts
from planner.runtime.state import trained
from tests.routing_faults import (
    ends_of_all_rows,
    in_the_order_of_experts,
    router_without_its_sum,
)
from tests.runtime.scenarios import capture, models
from tests.runtime.test_experts import plan_of, with_own_rows
from tests.runtime.test_verify_faults import source_of
from tests.spawn import run_ranks

MODEL = "biased-routed-gpt"

Breaks = Callable[[ExitStack], None]
"""Enters patches that break a rank's runtime."""


def patch(owner: Any, **named: Any) -> Breaks:
    def entered(stack: ExitStack) -> None:
        for name, value in named.items():
            stack.enter_context(mock.patch.object(owner, name, value))

    return entered


def patch_called(**named: Any) -> Breaks:
    """Break functions that programs call by their names."""
    return lambda stack: stack.enter_context(mock.patch.dict(program_fx._OWN, named)) and None


# ------------------------------------------------------------------------------ whose gradients


def summed_over(name: str) -> Breaks:
    """An expert's gradient is summed over these ranks, in the place of those with its replicas."""
    whose = property(lambda placed: name if placed.are_of_experts else "data")
    return patch(Placements, replicas=whose)


_sharing = trained.sharing


def counted_by_each(placements: Placements, *, is_sharded: bool) -> Sharing:
    """Each replica of an expert counts its gradient in the norm as if it had it alone."""
    found = _sharing(placements, is_sharded=is_sharded)
    return replace(found, alike=()) if placements.are_of_experts else found


# ---------------------------------------------------------------------------------- whose rows


_deal_runs, _exchanged, _bias = experts.deal_runs, experts._exchanged, local_ops.bias_of_runs


def _ends_before(dealt: Tensor, group: str, own: Tensor) -> Tensor:
    """Return where runs of a rank's experts ended among the rows that it had before; the last
    where it ends, as there is no run behind it.
    """
    rank = dist.get_rank(dist.distributed_c10d._resolve_process_group(group))
    return torch.cat([dealt[0, rank].cumsum(0).to(own)[:-1], own[-1:]])


def ends_before_the_exchange(ends: Tensor, group: str, parts: int) -> tuple[Tensor, Tensor]:
    """Rows that came are multiplied as if they were those that the rank had."""
    dealt, own = _deal_runs(ends, group, parts)
    return dealt, _ends_before(dealt, group, own)


def as_they_came(rows: Tensor, dealt: Tensor, group: str, back: bool, **told: bool) -> Tensor:
    """Rows in the order of experts are sent back as if they were in that of the ranks."""
    if not back:
        return _exchanged(rows, dealt, group, back, **told)
    sent, got = dealt.sum(2).tolist()
    return collectives.all_to_all_rows(rows.contiguous(), group, got, sent)


def biases_before_the_exchange(stack: ExitStack) -> None:
    """Biases are those of the rows that the rank had: only matrices go with the rows that came."""
    had: list[Tensor] = []

    def dealt(ends: Tensor, group: str, parts: int) -> tuple[Tensor, Tensor]:
        found, own = _deal_runs(ends, group, parts)
        had[:] = [_ends_before(found, group, own)]
        return found, own

    def biased(rows: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
        (before,) = had
        return _bias(rows, biases, before)

    patch_called(deal_runs=dealt)(stack)
    patch(local_ops, bias_of_runs=biased)(stack)


# --------------------------------------------------------------------------------------- faults

EXPERTS = r"layers\.\d\.experts\.(up|down|up_bias)"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken, and the kind of tensors that it shows in first, with the worst one's name."""

    breaks: Breaks
    kind: str = "gradient"
    name: str = EXPERTS


SPREAD = {
    "experts' gradients summed over data": Fault(breaks=summed_over("data")),
    "experts' gradients summed over nobody": Fault(breaks=summed_over("nobody")),
    "an expert counted by each replica in the norm": Fault(
        breaks=patch(trained, sharing=counted_by_each), kind="norm", name="all gradients"
    ),
    "ends of runs before the exchange": Fault(
        breaks=patch_called(deal_runs=ends_before_the_exchange), kind="loss", name="loss"
    ),
    "rows that are not put back in order": Fault(
        breaks=patch(experts, _exchanged=as_they_came), kind="loss", name="loss"
    ),
    "biases of the rows before the exchange": Fault(
        breaks=biases_before_the_exchange, kind="loss", name="loss"
    ),
}
"""Of experts on ranks of their own."""


def _without_the_sum(graph: Any, plan: Plan, index: int, **given: Any) -> Any:
    own = _local_program(graph, plan, index, **given)
    return router_without_its_sum(own)


_local_program = programs.local_program

CUT = {
    "a router without the sum of its gradients": Fault(
        breaks=patch(programs, local_program=_without_the_sum), name=r"layers\.\d\.experts\.router"
    ),
    "ends of all ranks' rows": Fault(
        breaks=patch(local_ops, sort_rows=ends_of_all_rows), kind="loss", name="loss"
    ),
    "rows that stay in the order of experts": Fault(
        breaks=patch(local_ops, unsort_rows=in_the_order_of_experts), kind="loss", name="loss"
    ),
}
"""Of rows that each rank of tp routes itself."""


FAULTS = {"spread": SPREAD, "cut": CUT}


def reports(captured: Any, plan: Plan, faults: str) -> dict[str, VerifyReport | None]:
    """What `verify` says of each of these faults, and of none, on rank 0."""
    graph = from_json(captured)
    source = source_of(models()[MODEL].build, models()[MODEL].batch)
    found = {}
    for name, fault in {"": None, **FAULTS[faults]}.items():
        with ExitStack() as stack:
            if fault is not None:
                fault.breaks(stack)
            found[name] = compare_with_one_process(plan, source, steps=1, graph=graph)
    return found


def check(num_ranks: int, plan: Plan, faults: str) -> None:
    """Each fault is found in the tensors it is in, and without any nothing is."""
    captured = to_json(capture(MODEL, torch.float64))
    found = run_ranks(reports, num_ranks, captured, plan, faults)[0]
    assert found[""].passed, found[""]
    for name, fault in FAULTS[faults].items():
        report = found[name]
        assert not report.passed, f"{name} is not found: {report}"
        worst = getattr(report, fault.kind)
        assert worst.times > 1e4, f"{name}: {report}"
        assert re.search(fault.name, worst.name), f"{name}: {report}"


def test_faults_of_experts_on_ranks_of_their_own() -> None:
    """Two replicas of each expert on four ranks, which route different rows."""
    check(4, plan_of(MODEL, dp=4, ep=2), "spread")


def test_faults_of_rows_that_ranks_route_themselves() -> None:
    check(2, with_own_rows(plan_of(MODEL, tp=2), MODEL), "cut")
