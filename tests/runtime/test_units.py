"""Samples that belong together: replicas and microbatches take whole units, as one process does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import planner
from planner.errors import LayoutError, ModelError, PlanError
from planner.language.graph import ModelGraph, Unit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests import units
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.spawn import run_ranks
from tests.units import UNITS, Body, batch, build

RTOL = 1e-10


def capture(body: Body) -> ModelGraph:
    unit, before = UNITS[body], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        two, three = (batch(count * unit.size, torch.float64) for count in (2, 3))
        return capture_module(build(body), two, three, name=body.__name__, unit=unit)
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Case:
    """A plan of a body by its name, and for each step the units of each replica.

    With `as_parts` each replica is given its own; `waits` are steps without update.
    """

    body: str
    plan: Plan
    steps: tuple[tuple[int, ...], ...]
    as_parts: bool = False
    waits: tuple[int, ...] = ()


def _case(body: Body, *steps: tuple[int, ...], waits: Any = (), parts: bool = False, **plan: Any):
    return Case(body.__name__, default_plan(capture(body), **plan), steps, parts, waits)


def gaps(cases: list[Case]) -> list[tuple[float, int]]:
    """Of each case the largest relative gap to one process, and the samples that were counted."""
    torch.set_default_dtype(torch.float64)
    return [_gap_of(case) for case in cases]


def _gap_of(case: Case) -> tuple[float, int]:
    body = getattr(units, case.body)
    module, unit = build(body), UNITS[body]
    alone = OneProcess(module, sgd)
    engine = planner.apply(case.plan, module, optimizer=sgd(module))
    seen: list[torch.Tensor] = []
    alone.module.layers[-1].register_forward_hook(lambda module, args, made: seen.append(made))
    worst, waiting = 0.0, []
    for number, counts in enumerate(case.steps):
        whole = batch(sum(counts) * unit.size, torch.float64)
        given: Any = whole
        if case.as_parts:
            # By hand: [runs, units, samples of a unit in each run].
            places = torch.arange(sum(counts) * unit.size)
            places = places.view(unit.runs, sum(counts), unit.size // unit.runs)
            first = sum(counts[: engine.replica])
            own = places[:, first : first + counts[engine.replica]].reshape(-1)
            given = planner.OwnPart({name: tensor[own] for name, tensor in whole.items()})
        expected = alone.module(**whole)
        assert engine.evaluate(given).item() == pytest.approx(expected.item(), rel=RTOL)
        loss = engine.step(given, update=number not in case.waits, fetch=["layers.2/add"])
        worst = max(worst, abs(loss.item() / expected.item() - 1))
        if engine.fetched and not case.as_parts:
            torch.testing.assert_close(engine.fetched["layers.2/add"], seen[-1].detach())
        waiting.append((whole, sum(counts)))
        if number in case.waits:
            continue
        total = sum(count for _, count in waiting)
        alone.update([each for each, _ in waiting], [count / total for _, count in waiting])
        waiting.clear()
        worst = max(worst, gap_to_largest(engine.full_gradients(), alone.gradients()))
    worst = max(worst, gap_to_largest(engine.full_state_dict(), alone.parameters()))
    return worst, engine.samples


def _check(cases: list[Case], ranks: int) -> None:
    for case, (gap, counted) in zip(cases, run_ranks(gaps, ranks, cases)[0], strict=True):
        assert gap < RTOL, case
        size = UNITS[getattr(units, case.body)].size
        assert counted == size * sum(map(sum, case.steps)), case


def test_units_equal_one_process():
    """Whole batches and own parts, full, uneven and short ones, with and without an update."""
    dp2, pp2 = {"dp": 2, "num_microbatches": 2}, {"pp": 2, "num_microbatches": 3}
    _check(
        [
            _case(units.chunked, (4, 4), (3, 3), **dp2, microbatch_size=4),
            _case(units.chunked, (2, 4), (3, 2), parts=True, **dp2, microbatch_size=4),
            _case(units.chunked, (2, 2), (3, 4), waits=(0,), **dp2, microbatch_size=4),
            _case(units.chunked, (6,), (4,), **pp2, microbatch_size=4),
            _case(units.chunked, (3,), tp=2, num_microbatches=1, microbatch_size=6),
            _case(units.groups, (4, 4), (3, 2), **dp2, microbatch_size=8, zero_stage=3),
            _case(units.strided, (2, 2), parts=True, **dp2, microbatch_size=2),
            _case(units.groups_of_pairs, (4, 4), (3, 3), **dp2, microbatch_size=8),
            _case(units.triplets_stacked, (5,), **pp2, microbatch_size=6),
            _case(units.labels_of_pairs, (4, 4), (3, 4), **dp2, microbatch_size=4),
            _case(units.labels_of_pairs, (3, 4), parts=True, **dp2, microbatch_size=4),
        ],
        2,
    )


def test_units_equal_one_process_on_two_axes():
    """Replicas beside a pipeline."""
    both = {"dp": 2, "pp": 2, "num_microbatches": 2}
    _check(
        [
            _case(units.chunked, (4, 4), (3, 3), **both, microbatch_size=4),
            _case(units.groups, (4, 4), (4, 3), **both, microbatch_size=8),
        ],
        4,
    )


def gap_of_stacked_pairs(plan: Plan) -> float:
    """The largest gap of a step on pairs that a script counts as samples, halves stacked."""
    torch.set_default_dtype(torch.float64)
    module = build(units.chunked)
    alone = OneProcess(module, sgd)
    engine = planner.apply(plan, module, optimizer=sgd(module))
    batches = [batch(2 * size, torch.float64) for size in (8, 5)]
    gaps = train_beside(engine, alone, batches, gap=gap_to_largest)
    assert engine.samples == 13
    return gaps.largest


def test_pairs_that_are_samples_equal_one_process():
    """Each replica takes its pairs from both halves; a step may have any number of them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        two, three = (batch(2 * count, torch.float64) for count in (2, 3))
        graph = capture_module(build(units.chunked), two, three, unit=Unit(runs=2))
    finally:
        torch.set_default_dtype(before)
    plan = default_plan(graph, dp=2, num_microbatches=2, microbatch_size=2)
    assert plan.global_batch == 8
    assert run_ranks(gap_of_stacked_pairs, 2, plan)[0] < RTOL


def test_a_batch_that_ends_inside_a_unit_is_refused():
    """The rule is told with the unit and the nearest sizes, in samples."""
    said = run_ranks(
        refusals, 1, default_plan(capture(units.chunked), num_microbatches=1, microbatch_size=8)
    )[0]
    assert said == [
        "the batch tensor x has 7 samples, and samples belong together in pairs (halves "
        "stacked), so it must be a multiple of 2: use 6 or 8",
        "the batch has 10 samples; 1 microbatches on 1 replicas of at most 8 samples take 2 to 8; "
        "give batches of that size",
    ]


def refusals(plan: Plan) -> list[str]:
    torch.set_default_dtype(torch.float64)
    engine = planner.apply(plan, build(units.chunked))
    said = []
    for size in (7, 10):
        with pytest.raises(ModelError) as refused:
            engine.step(batch(size, torch.float64))
        said.append(str(refused.value))
    return said


def test_a_plan_holds_whole_units():
    """Its file says samples; one that cuts a unit is refused."""
    graph = capture(units.chunked)
    plan = default_plan(graph, dp=2, num_microbatches=3, microbatch_size=4)
    assert (plan.global_batch, plan.global_units, plan.least_batch) == (24, 12, 12)
    assert plan.split.num_samples == 12
    assert plan.stage_microbatch_size(0) == 2
    data = plan.model_dump(mode="json")
    assert Plan.model_validate(data) == plan
    assert data["model"]["unit"]["size"] == 2
    with pytest.raises(ValueError, match=r"microbatch_size is 3, and samples .*: use 2 or 4"):
        Plan.model_validate({**data, "microbatch_size": 3})
    with pytest.raises(LayoutError, match="microbatch_size=5 was given, and samples belong"):
        default_plan(graph, microbatch_size=5)
    with pytest.raises(ValueError, match="give all stages one mesh"):
        default_plan(graph, pp=2, tp=2, microbatch_size=4, by_stage={"tp": (2, 1)})


def test_an_evaluation_fills_no_stacked_batch_up():
    """A last batch of the Trainer's is repeated where units are neighbours, and refused in runs."""
    repeated = pytest.importorskip("planner.integrations.huggingface")._repeated
    whole = batch(4)
    stacked = default_plan(capture(units.chunked), num_microbatches=1, microbatch_size=8)
    assert repeated(batch(8), 8, stacked)["x"].shape[0] == 8
    with pytest.raises(PlanError, match=r"belong together in pairs \(halves stacked\) and can't"):
        repeated(whole, 4, stacked)
    beside = default_plan(capture(units.strided), num_microbatches=1, microbatch_size=8)
    assert torch.equal(repeated(whole, 4, beside)["x"], torch.cat([whole["x"]] * 2))
