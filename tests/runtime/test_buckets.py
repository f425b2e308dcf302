"""Sequences of several lengths under one plan (N19): equal to one process, in fp64."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import planner
from planner.errors import LayoutError, ModelError, PlannerError
from planner.language.graph import ModelGraph
from planner.language.lowering.attention_cut import uncut_sequences_messages
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, load_plan, save_plan
from planner.language.plan.buckets import check_bucket, with_buckets
from tests.builders import SEQUENCE, PlainGPT, build_hf, gpt_batch
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.spawn import run_ranks

RTOL = {"gpt": 1e-10, "llama": 3e-6}
"""Hugging Face's norms and losses compute in fp32, whatever the dtype of a model."""

LENGTHS = (4, 8)
PAD = {
    "gpt": {"ids": 0, "labels": -100},
    "llama": {"input_ids": 0, "attention_mask": 0, "labels": -100},
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return PlainGPT(layers=2) if name == "gpt" else build_hf("LlamaForCausalLM")


def batch_of(name: str, size: int, length: int = SEQUENCE) -> dict[str, torch.Tensor]:
    """Samples of a length; of a Llama some are shorter, their rest masked."""
    batch = {k: v[:, :length].contiguous() for k, v in gpt_batch(size).items()}
    if name == "gpt":
        return batch
    mask = torch.ones_like(batch["ids"])
    labels = batch["ids"].clone()
    for i in range(size):
        mask[i, length - i % 3 :] = 0
    labels[mask == 0] = -100
    return {"input_ids": batch["ids"], "attention_mask": mask, "labels": labels}


@cache
def graph_of(name: str, length: int) -> ModelGraph:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        two, three = (batch_of(name, size, length) for size in (2, 3))
        return capture_module(build(name), two, three, name=name)
    finally:
        torch.set_default_dtype(before)


def plan_of(name: str, **choices: Any) -> Plan:
    graph = graph_of(name, SEQUENCE)
    plan = default_plan(graph, **choices)
    return with_buckets(plan, graph, [graph_of(name, length) for length in (*LENGTHS, SEQUENCE)])


@dataclass(frozen=True)
class Case:
    """A model under a plan; of each step the lengths that replicas have."""

    model: str
    plan: Plan
    lengths: tuple[tuple[int, ...], ...]


def gaps_of_lengths(cases: list[Case]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    return [_gap_of(case) for case in cases]


def _gap_of(case: Case) -> float:
    module = build(case.model)
    alone = OneProcess(module, sgd)
    engine = planner.apply(
        case.plan,
        module,
        optimizer=sgd(module),
        loss_weight=planner.count_tokens("labels", skip_first=case.model == "llama"),
        pad=PAD[case.model],
    )
    samples, worst = case.plan.global_batch // engine.num_replicas, 0.0
    for lengths in case.lengths:
        parts = [batch_of(case.model, samples, length) for length in lengths]
        whole = _together(parts, PAD[case.model])
        own = parts[0] if len(parts) == 1 else planner.OwnPart(parts[engine.replica])
        gaps = train_beside(
            engine,
            alone,
            [whole],
            given=lambda _, whole, own=own: own,
            evaluates=True,
            gap=gap_to_largest,
        )
        worst = max(worst, gaps.largest)
    return worst


def _together(parts: list[dict[str, torch.Tensor]], pad: dict[str, int]) -> dict[str, torch.Tensor]:
    """One batch of all parts, as long as the longest and no longer."""
    longest = max(next(iter(part.values())).shape[1] for part in parts)
    return {
        k: torch.cat(
            [
                torch.nn.functional.pad(p[k], (0, longest - p[k].shape[1]), value=pad[k])
                for p in parts
            ]
        )
        for k in parts[0]
    }


def test_lengths_equal_one_process():
    """N19: lengths of buckets and between them, other ones on each replica, steps in turn."""
    two = {"num_microbatches": 2, "microbatch_size": 2}
    cases = [
        Case("gpt", plan_of("gpt", dp=2, **two), ((4, 8), (3, 2))),
        Case("gpt", plan_of("gpt", pp=2, **two, recompute="full"), ((8,), (3,))),
        Case("gpt", plan_of("gpt", cp=2, **two), ((7,),)),
    ]
    for case, gap in zip(cases, run_ranks(gaps_of_lengths, 2, cases)[0], strict=True):
        assert gap < RTOL[case.model], case


def test_lengths_that_do_not_divide_are_filled_up():
    """N8: a plan of one shape, whose sequences cp and tp divide; batches have fewer positions."""
    two = {"num_microbatches": 2, "microbatch_size": 2}
    plans = [default_plan(graph_of("gpt", SEQUENCE), **{axis: 2}, **two) for axis in ("cp", "tp")]
    cases = [Case("gpt", plan, ((SEQUENCE - 1,), (9,))) for plan in plans]
    for case, gap in zip(cases, run_ranks(gaps_of_lengths, 2, cases)[0], strict=True):
        assert gap < RTOL[case.model], case


def test_lengths_that_do_not_divide_are_named():
    graph = graph_of("gpt", SEQUENCE - 1)
    with pytest.raises(LayoutError) as refused:
        default_plan(graph, cp=2)
    assert str(refused.value).endswith(
        "its sequence of 15 does not divide by 2; use a cp that divides it, or sequences of 14 or "
        "16: planner.apply(..., pad=) fills shorter ones up to 16"
    )
    (told,) = uncut_sequences_messages(graph, default_plan(graph, tp=2))
    assert told.startswith("dp=1 cp=1 tp=2 does not divide sequences of 15, so between products")
    assert "of 16 it may have 1/2" in told
    whole = graph_of("gpt", SEQUENCE)
    assert uncut_sequences_messages(whole, default_plan(whole, tp=2)) == ()
    engine = planner.apply(default_plan(whole, microbatch_size=2), build("gpt").double())
    with pytest.raises(ModelError, match=r"ids has shape \(2, 15\).* it must be \(2, 16\)"):
        engine.step(batch_of("gpt", 2, 15))
    plan = default_plan(whole, microbatch_size=2)
    engine = planner.apply(plan, build("gpt").double(), pad=PAD["gpt"])
    longer = {k: torch.cat([v, v], 1) for k, v in batch_of("gpt", 2).items()}
    with pytest.raises(ModelError, match=r"must be \(2, 16\) or less, filled up"):
        engine.step(longer)


@pytest.mark.slow
def test_lengths_of_a_hugging_face_model_equal_one_process():
    """N19: a Llama with a mask of what is filled up."""
    pytest.importorskip("transformers")
    two = {"num_microbatches": 2, "microbatch_size": 2}
    cases = [
        Case("llama", plan_of("llama", dp=2, **two), ((4, 7),)),
        Case("llama", plan_of("llama", tp=2, **two), ((5,),)),
    ]
    for case, gap in zip(cases, run_ranks(gaps_of_lengths, 2, cases)[0], strict=True):
        assert gap < RTOL[case.model], case


def test_a_bucket_is_run_at_its_own_size():
    """Not all filled up to the largest: what blocks are given has the bucket's length."""
    engine = planner.apply(
        plan_of("gpt", num_microbatches=2), build("gpt").double(), pad=PAD["gpt"]
    )
    for length, ran in ((3, 4), (4, 4), (5, 8), (9, 16), (16, 16)):
        feed = engine._feed(batch_of("gpt", 2, length))
        (ids, *_) = feed.side_inputs(0, 0)
        assert ran in ids.shape
        assert engine._programs.bucket == feed.bucket


def refusals(plan: Plan) -> list[str]:
    said = []
    for pad in ({}, {"ids": 0}):
        engine = planner.apply(plan, build("gpt").double(), pad=pad)
        lengths = (4, 8)[engine.replica], 5
        for length in lengths:
            try:
                engine.step(planner.OwnPart(batch_of("gpt", 2, length)))
                said.append("")
            except PlannerError as error:
                said.append(str(error))
    return said


def test_what_is_not_to_be_filled_up_has_the_shape_of_a_bucket():
    first, second = run_ranks(refusals, 2, plan_of("gpt", dp=2, microbatch_size=2))
    assert first == second
    assert first[0].startswith("ranks have batches of different shapes; planner.apply(..., pad=")
    assert "has shape (2, 5); for 2 samples it must be (2, 16), or as one of 2 buckets" in first[1]
    assert first[2].startswith("ranks have batches of different shapes")
    assert "batch tensor labels has shape (2, 5)" in first[3]


def test_a_loader_fills_samples_up():
    """Samples of any length, as tokenizers give them, lists of numbers included."""
    plan = plan_of("gpt", num_microbatches=2, microbatch_size=2)
    module = build("gpt").double()
    alone = copy.deepcopy(module)
    engine = planner.apply(plan, module, loss_weight=planner.count_tokens("labels"), pad=PAD["gpt"])
    rows = [batch_of("gpt", 4, length) for length in (3, 2, 7, 5)]
    data = [{k: v[i].tolist() for k, v in row.items()} for i, row in enumerate(rows)]
    (part,) = engine.loader(data)
    assert part.batch["ids"].shape == (4, 7)
    whole = {
        k: torch.tensor([s[k] + [v] * (7 - len(s[k])) for s in data]) for k, v in PAD["gpt"].items()
    }
    assert engine.evaluate(part).item() == pytest.approx(alone(**whole).item(), rel=RTOL["gpt"])


def test_buckets_are_part_of_the_plan(tmp_path):
    plan = plan_of("gpt", num_microbatches=2)
    assert [bucket.inputs[0][2][1] for bucket in plan.model.buckets] == [4, 8]
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    graph = graph_of("gpt", SEQUENCE)
    with pytest.raises(ModelError, match=r"ids has 16 entries in a bucket and 8 in the plan's own"):
        check_bucket(graph_of("gpt", 8), graph)
    other = graph_of("gpt", 8)
    fewer = replace(other, blocks=other.blocks[:-1])
    with pytest.raises(ModelError, match="the model is not cut into the blocks of gpt"):
        check_bucket(graph, fewer)
    with pytest.raises(ModelError, match="pad has x, and the batch has ids, labels; name"):
        planner.apply(plan, build("gpt").double(), pad={"x": 0})
