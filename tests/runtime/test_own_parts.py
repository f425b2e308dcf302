"""Each replica gives a step its own samples (N19, M6, D13): equal to one process, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import planner
from planner.errors import PlannerError
from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.step.engine import Engine
from tests.builders import PlainGPT, gpt_batch
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.runtime.scenarios import capture, models
from tests.spawn import run_ranks

RTOL = 1e-10


@dataclass(frozen=True)
class Case:
    """A plan, and for each step how many samples each replica has; with labels that do not count,
    of which the engine is told by `loss_weight`, or finds them itself.
    """

    plan: Plan
    steps: tuple[tuple[int, ...], ...]
    counts_tokens: bool = False
    is_told: bool = False


def _plan(**choices: Any) -> Plan:
    return default_plan(capture("gpt", torch.float64), **choices)


def _batch(size: int, counts_tokens: bool) -> dict[str, torch.Tensor]:
    batch = gpt_batch(size)
    if counts_tokens:
        for i in range(size):
            batch["labels"][i, i + 1 :] = -100
    return batch


def gaps_of_parts(cases: list[Case]) -> list[tuple[float, int]]:
    """Of each case the largest relative gap to one process, and the samples that were counted."""
    torch.set_default_dtype(torch.float64)
    return [_gap_of(case) for case in cases]


def _gap_of(case: Case) -> tuple[float, int]:
    torch.manual_seed(0)
    module = models()["gpt"].build()
    alone = OneProcess(module, sgd)
    weight = planner.count_tokens("labels") if case.is_told else None
    engine = planner.apply(case.plan, module, optimizer=sgd(module), loss_weight=weight)
    steps = iter(case.steps)

    def own_part(engine: Engine, batch: dict[str, torch.Tensor]) -> planner.OwnPart:
        samples = next(steps)
        assert engine.num_replicas == len(samples)
        first = sum(samples[: engine.replica])
        own = {k: v[first : first + samples[engine.replica]] for k, v in batch.items()}
        return planner.OwnPart(_what_is_read(engine, own))

    gaps = train_beside(
        engine,
        alone,
        [_batch(sum(samples), case.counts_tokens) for samples in case.steps],
        given=own_part,
        evaluates=True,
        gap=gap_to_largest,
    )
    return gaps.largest, engine.samples


def _what_is_read(engine: Any, own: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Without what this rank's stages do not read."""
    reads = engine.reads
    return {k: v if k in reads else None for k, v in own.items()} if reads else None


def test_own_parts_equal_one_process():
    """N19: samples count alike however many each replica has; M6: and so do tokens."""
    dp2 = {"dp": 2, "num_microbatches": 2, "microbatch_size": 3}
    cases = [
        Case(_plan(**dp2), ((6, 2), (3, 5))),
        Case(_plan(**dp2, zero_stage=3), ((3, 6),), counts_tokens=True),
        Case(_plan(**dp2), ((3, 6),), counts_tokens=True, is_told=True),
        Case(_plan(cp=2, num_microbatches=2, microbatch_size=2), ((3,),), counts_tokens=True),
        Case(_plan(pp=2, num_microbatches=3, microbatch_size=2), ((4,),), counts_tokens=True),
    ]
    for case, (gap, counted) in zip(cases, run_ranks(gaps_of_parts, 2, cases)[0], strict=True):
        assert gap < RTOL, case
        assert counted == sum(map(sum, case.steps))


def test_own_parts_equal_one_process_on_two_axes():
    """N19, D13: three pp ranks, of which one reads nothing; replicas beside a pipeline."""
    pipeline = _plan(dp=2, pp=2, num_microbatches=3, microbatch_size=2, schedule="zb_h1")
    cases = [Case(pipeline, ((6, 4), (3, 5))), Case(pipeline, ((5, 6),), True)]
    for case, (gap, _) in zip(cases, run_ranks(gaps_of_parts, 4, cases)[0], strict=True):
        assert gap < RTOL, case
    deep = [Case(_plan(pp=3, num_microbatches=3, microbatch_size=2), ((5,),), True)]
    assert run_ranks(gaps_of_parts, 3, deep)[0][0][0] < RTOL


def refusals(plan: Plan, parts: list[dict[int, Any]]) -> list[str]:
    """What the engine says of parts by replica (or rank); then it trains on a good one."""
    torch.manual_seed(0)
    engine = planner.apply(plan, PlainGPT())
    rank = torch.distributed.get_rank()
    said = []
    for by_rank in parts:
        try:
            engine.step(planner.OwnPart(by_rank[rank]))
            said.append("")
        except PlannerError as error:
            said.append(str(error))
    return said


def test_what_is_wrong_with_one_part_is_told_on_every_rank():
    """No rank waits for one that has failed; the next step is as if nothing had been."""
    good, short = gpt_batch(4), gpt_batch(1)
    lacking = {"ids": good["ids"]}
    plan = default_plan(capture("gpt"), dp=2, num_microbatches=2, microbatch_size=2)
    wrong = [{0: good, 1: short}, {0: good, 1: lacking}, {0: good, 1: None}, {0: good, 1: good}]
    first, second = run_ranks(refusals, 2, plan, wrong)
    assert first == second
    assert first[0].startswith("replica 1 has 1 samples; 2 microbatches of at most 2 take 2 to 4")
    assert first[1].startswith("rank 1: the batch lacks labels")
    assert first[2].startswith("rank 1: the batch lacks")
    assert first[3] == ""
    plan = default_plan(capture("gpt"), tp=2, num_microbatches=2, microbatch_size=2)
    other = {k: v.flip(0) for k, v in good.items()}
    wrong = [{0: good, 1: other}, {0: good, 1: gpt_batch(3)}, {0: good, 1: good}]
    first, second = run_ranks(refusals, 2, plan, wrong)
    assert first == second
    assert "ranks 0 and 1 are of one replica and have other samples (other values of" in first[0]
    assert "have other samples (4 and 3)" in first[1]
    assert first[2] == ""


def of_batches(plan: Plan, by_rank: list[dict[str, torch.Tensor]]) -> list[str]:
    """What the engine says of whole batches, one for each rank; then it trains on a good one."""
    engine = planner.apply(plan, PlainGPT())
    own = by_rank[torch.distributed.get_rank()]
    said = []
    for run in (engine.step, engine.evaluate):
        try:
            run(own)
            said.append("")
        except PlannerError as error:
            said.append(str(error))
    engine.step(by_rank[0])
    return said


def test_whole_batches_must_be_one_on_all_ranks():
    """Each rank takes its part of what it is given: ids of one batch, and labels of another."""
    good = gpt_batch(4)
    other = good | {"labels": good["labels"].flip(0)}
    for sizes in ({"pp": 2, "num_microbatches": 2, "microbatch_size": 2}, {"tp": 2}, {"dp": 2}):
        choices = {"num_microbatches": 1, "microbatch_size": 4 // sizes.get("dp", 1)} | sizes
        plan = default_plan(capture("gpt"), **choices)
        first, second = run_ranks(of_batches, 2, plan, [good, other])
        assert first == second
        for said in first:
            assert said.startswith(
                "the 2 ranks were given different batches (other values of labels); give every "
                "rank the same whole batch (one seed for a loader that shuffles)"
            )


def test_stages_that_cut_the_batch_differently_refuse_parts():
    plan = default_plan(capture("gpt"), tp=2, pp=2, by_stage={"tp": (2, 1)}, microbatch_size=4)
    said = run_ranks(refusals, 4, plan, [dict.fromkeys(range(4), gpt_batch(4))])
    assert {each[0] for each in said} == {said[0][0]}
    assert said[0][0].startswith("stages of the plan cut the batch in 1 and 2 parts")


def test_a_split_of_parts_gives_each_its_own():
    split = BatchSplit.of_parts((5, 2), num_microbatches=2)
    assert split.sizes == ((2, 1), (3, 1))
    assert split.num_samples == 7
    assert split.own(2, 0) == (range(2), range(2, 5))
    assert split.own(2, 1) == (range(1), range(1, 2))
    assert split.own(1, 0) == (range(3), range(3, 7))
    assert [split.part(1, 2, d) for d in range(2)] == [range(3, 6), range(6, 7)]
