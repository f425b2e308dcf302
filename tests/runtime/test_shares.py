"""Issue 19, point 5: replicas that take different shares of a microbatch (fp64, rtol 1e-10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.errors import LayoutError, ModelError
from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.inputs.feed import whole_split
from tests.runtime.scenarios import capture, models
from tests.runtime.test_uneven import RTOL, Case, gaps_to_one_process
from tests.spawn import run_ranks


def shared(shares: tuple[int, ...], model: str = "gpt", **choices: Any) -> Plan:
    """A plan of dp replicas with shares of a microbatch."""
    size = sum(shares) // len(shares)
    graph = capture(model, torch.float64)
    plan = default_plan(graph, dp=len(shares), microbatch_size=size, **choices)
    return Plan.model_validate({**plan.model_dump(mode="json"), "shares": shares})


def test_each_replica_has_its_share_of_every_microbatch():
    plan = shared((4, 2), num_microbatches=2)
    assert plan.split.sizes == ((4, 2), (4, 2))
    assert plan.least_batch == 6
    # 7 samples are 3 and 4; of 3 the first has 4/6, of 4 so many as well, rounded down.
    assert whole_split(7, plan).sizes == ((2, 1), (2, 2))
    assert BatchSplit.by_shares(6, num_microbatches=1, shares=(1, 1, 1)).sizes == ((2, 2, 2),)
    with pytest.raises(ModelError, match="at most 4 samples take 6 to 12"):
        whole_split(5, plan)
    assert Plan.model_validate(plan.model_dump(mode="json")) == plan
    assert plan.shares_spelled == "1 x 4, 1 x 2"


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((3, 1, 2), "3 shares given; its stages cut a microbatch in 2 parts"),
        ((3, 2), "shares add up to 5 samples; a microbatch has 4"),
        ((4, 0), "greater than or equal to 1"),
    ],
)
def test_shares_fit_the_plan(shares, says):
    plan = shared((3, 1)).model_dump(mode="json")
    with pytest.raises(ValueError, match=says):
        Plan.model_validate({**plan, "shares": shares})


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_replicas_of_unlike_shares_equal_one_process(stages):
    """Every sample counts the same; ZeRO's messages are as many on each replica."""
    cases = [
        Case("gpt", shared((4, 2), num_microbatches=2, zero_stage=zero), (12, 7)) for zero in stages
    ]
    cases.append(Case("gpt", shared((3, 1), num_microbatches=2, recompute="full"), (8,)))
    # A mean over labels that count: the replica with more samples has fewer of these.
    cases.append(Case("gpt", shared((1, 3), num_microbatches=2), (8,), counts_tokens=True))
    gaps = run_ranks(gaps_to_one_process, 2, cases)[0]
    for case, gap in zip(cases, gaps, strict=True):
        assert gap < RTOL, f"{case.plan.shares} ZeRO {case.plan.zero_stage}: {gap}"


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shares_go_with_pipelines_and_pieces(are_all):
    both = {"num_microbatches": 2}
    cases = [
        Case("tied-gpt", shared((3, 1), "tied-gpt", pp=2, zero_stage=1, **both), (8,)),
        Case("gpt", shared((4, 2), tp=2, **both), (12,)),
    ]
    if are_all:
        cases += [
            Case("gpt", shared((3, 1), pp=2, **both), (8,)),
            Case("gpt", shared((3, 1, 2, 2), zero_stage=3, **both), (16,)),
        ]
    gaps = run_ranks(gaps_to_one_process, 4, cases)[0]
    for case, gap in zip(cases, gaps, strict=True):
        assert gap < RTOL, f"{case.plan.shares} pp={case.plan.pp} tp={case.plan.tp}: {gap}"


def refused(plan: Plan) -> str:
    torch.set_default_dtype(torch.float64)
    module = models()["gpt"].build()
    with pytest.raises(LayoutError) as error:
        planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    return str(error.value)


def test_a_share_that_a_layout_does_not_divide_is_refused_at_the_start():
    """The default layout on tp cuts samples between ops."""
    for said in run_ranks(refused, 4, shared((3, 1), tp=2, num_microbatches=2)):
        assert "can't be run as planned" in said
        assert "give replicas shares whose sizes divide as 2 does" in said


class Numbered(torch.utils.data.Dataset):
    """Samples of the gpt that say which they are."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = models()["gpt"].batch(1)
        return {name: torch.full_like(t[0], index) for name, t in batch.items()}


def dealt(plan: Plan) -> list[list[int]]:
    """The samples of this rank in each step, from the engine's loader."""
    torch.set_default_dtype(torch.float64)
    module = models()["gpt"].build()
    engine = planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    parts = []
    for part in engine.loader(Numbered()):
        leaves = next(iter(part.batch.values()))
        parts.append(leaves[:, 0].tolist())
        engine.step(part)
    return parts


def test_a_loader_deals_shares():
    first, second = run_ranks(dealt, 2, shared((3, 1), num_microbatches=2))
    assert first == [[0, 1, 2, 4, 5, 6], [8, 9, 10, 12, 13, 14]]
    assert second == [[3, 7], [11, 15]]
