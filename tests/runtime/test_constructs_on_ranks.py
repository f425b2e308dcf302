"""N1: what a capture keeps trains under dp, tp and pp as in one process.

Buffers that a forward writes are the hard part: several microbatches are in flight, each
replica has its own, and recomputed blocks read what the first run read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.capture import capture_module
from planner.capture.source.model_file import ModelSource
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.plan.accepted import ACCEPTED
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.constructs import CONSTRUCTS, batch
from tests.spawn import run_ranks

KEPT = {construct.what: construct for construct in CONSTRUCTS if not construct.refused}
QUICK = [
    "`torch.autograd.Function` of parameters, of several results",
    "moving average in a buffer (`self.m.mul_(0.9).add_(...)`)",
    "parameter that no gradient reaches",
    "state-dict hooks",
    "`torch.func.functional_call`",  # uses a layer twice in a block
]

LAYOUTS = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


def compare(cases: list[tuple[str, Plan]]) -> list[VerifyReport | None]:
    torch.set_default_dtype(torch.float64)
    found = []
    for what, plan in cases:
        source = ModelSource(
            path=Path("constructs"), build=KEPT[what].build, batch=batch, loss=None, dependencies=()
        )
        found.append(compare_with_one_process(plan, source, steps=2))
    return found


def _check(names: list[str], recompute: str = "none") -> None:
    cases = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for what in names:
            torch.manual_seed(0)
            graph = capture_module(KEPT[what].build(), batch(2), batch(3))
            for layout in LAYOUTS:
                plan = default_plan(
                    graph,
                    num_microbatches=4,
                    microbatch_size=2,
                    accept=tuple(ACCEPTED),  # buffers move on each replica
                    **layout,
                )
                stages = [s.model_copy(update={"recompute": recompute}) for s in plan.stages]
                cases.append((what, plan.model_copy(update={"stages": tuple(stages)})))
    finally:
        torch.set_default_dtype(before)
    for (what, plan), report in zip(cases, run_ranks(compare, 2, cases)[0], strict=True):
        assert report.passed, f"{what} dp={plan.dp} tp={plan.tp} pp={plan.pp}: {report}"


def test_the_most_telling_constructs_on_two_ranks():
    _check(QUICK)


def test_recomputed_blocks_read_their_buffers_as_the_first_run_did():
    _check(QUICK[1:2], recompute="full")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_every_construct_on_two_ranks(recompute):
    _check(list(KEPT), recompute)
