"""B12: packed documents are dealt by work to replicas and microbatches, and training stays what one
process computes of the whole batch, in fp64."""

from __future__ import annotations

import copy
import io
import random
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import planner
from planner.language.across.cut.documents import document_work
from planner.language.graph import Affine, ModelGraph, TensorMeta, Unit
from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.inputs.dealing import deal, imbalance
from planner.runtime.batches.inputs.documents import Documents, pairs_of
from planner.runtime.batches.inputs.feed import cut_batch, rows_of
from planner.timeline import DEAL, dealt_by_work, load_timeline
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.runtime.packed import Normed, Numbering, Ordered, Packed, batch_of
from tests.spawn import run_ranks

SAMPLES = 8
MODELS = {"packed": Packed, "ordered": Ordered, "normed": Normed, "numbering": Numbering}


@cache
def captured(name: str) -> ModelGraph:
    torch.set_default_dtype(torch.float64)
    try:
        return capture_module(MODELS[name](), batch_of(2), batch_of(3), name=name)
    finally:
        torch.set_default_dtype(torch.float32)


def plan_of(name: str = "packed", **choices: Any) -> Plan:
    return default_plan(captured(name), **choices)


# -------------------------------------------------------------------------------- work of samples


@pytest.mark.parametrize(
    ("low", "high"), [(0, None), (0, 3), (None, None), (-2, 2), (None, 0), (1, 4)]
)
def test_pairs_of_a_document_are_counted(low, high):
    for length in range(10):
        pairs = sum(
            (low is None or q - k >= low) and (high is None or q - k <= high)
            for q in range(length)
            for k in range(length)
        )
        assert pairs_of(torch.tensor([length]), low, high).item() == pairs


def test_work_is_the_pairs_that_the_mask_lets_through():
    """Two layers of two heads of width 4: 2 * (4 + 4) flop of a pair in each head and layer, and
    two and a half times as many in the backward. What is left is alike: mostly products of 64
    tokens with 2 * 8 * 24 + 8 * 16 weights, three times.
    """
    plan = plan_of(dp=2, num_microbatches=1, microbatch_size=4)
    told = Documents((captured("packed"),), plan, pad={})
    batch = batch_of(SAMPLES)
    documents = batch["documents"]
    sees = (documents[:, :, None] == documents[:, None, :]).tril()
    found = told.work(cut_batch(batch, captured("packed"), plan), range(SAMPLES))
    others = {
        work - round(3.5 * 64) * int(n) for work, n in zip(found, sees.sum((1, 2)), strict=True)
    }
    assert len(others) == 1
    products = 3 * 2 * 64 * (2 * 8 * 24 + 8 * 16)
    assert products < others.pop() < 1.15 * products


def test_tables_that_layers_make_alike_are_made_once():
    """Each layer's cumsum is an op of its own."""
    graph = captured("numbering")
    told = document_work(graph)
    assert told is not None
    assert len(told.pair_flop) == len(told.program.outputs) == 1
    plan = default_plan(graph, dp=2, num_microbatches=1, microbatch_size=4)
    batch = batch_of(SAMPLES)
    works = [
        Documents((each,), plan, pad={}).work(cut_batch(batch, each, plan), range(SAMPLES))
        for each in (graph, captured("packed"))
    ]
    longest = [max(work) - min(work) for work in works]
    assert longest[0] == longest[1]


def test_only_documents_whose_place_in_a_batch_does_not_count_are_dealt():
    assert document_work(captured("packed")) is not None
    assert document_work(captured("ordered")) is not None
    assert document_work(captured("normed")) is None
    one = plan_of(num_microbatches=4, microbatch_size=2)
    assert not Documents((captured("packed"),), one, pad={}).are_dealt  # nothing waits for a part


# ---------------------------------------------------------------------------------------- dealing


def test_dealing_keeps_the_samples_of_each_part_and_is_no_worse():
    draw = random.Random(0)
    for _ in range(300):
        microbatches, parts = draw.randint(1, 4), draw.randint(1, 4)
        shares = tuple(draw.randint(1, 2) for _ in range(parts))
        samples = draw.randint(microbatches * parts * 2, 40)
        split = BatchSplit.by_shares(samples, num_microbatches=microbatches, shares=shares)
        work = [draw.choice((1, 2, 10, 100)) * draw.randint(1, 9) for _ in range(samples)]
        dealt = deal(work, split)
        even = (1,) * parts
        assert dealt.given == imbalance(work, split, range(samples), even)
        if dealt.order is None:
            assert dealt.now == dealt.given
            continue
        assert sorted(dealt.order) == list(range(samples))
        assert dealt.now == imbalance(work, split, dealt.order, even)
        assert dealt.now.replica <= dealt.given.replica
        assert dealt.now != dealt.given


def test_dealing_is_near_the_best_there_is():
    """Against every way to halve ten samples: the fullest half is at most 4% above the least."""
    draw = random.Random(1)
    split = BatchSplit.even(10, num_microbatches=1, parts=2)
    for _ in range(100):
        work = [draw.randint(1, 30) ** 2 for _ in range(10)]
        least = min(
            max(sum(work[i] for i in half), sum(work) - sum(work[i] for i in half))
            for half in combinations(range(10), 5)
        )
        assert deal(work, split).now.replica <= 1.04 * least / (sum(work) / 2)


def test_long_documents_are_spread_over_replicas_and_microbatches():
    """Log-normal lengths, as of texts, packed into 64 samples of 4,096 places: the fullest of eight
    replicas has 1.7 times the mean's work as given, and at most 1.02 times dealt.
    """
    generator = np.random.default_rng(0)
    work = []
    for _ in range(64):
        left, pairs = 4096, 0
        while left:
            length = min(left, int(generator.lognormal(6, 1.5)) + 1)
            left, pairs = left - length, pairs + length * (length + 1) // 2
        work.append(pairs)
    work.sort(reverse=True)  # the worst there is: a data set sorted by length
    dealt = deal(work, BatchSplit.even(64, num_microbatches=4, parts=8))
    shuffled = random.Random(0).sample(work, 64)
    by_chance = deal(shuffled, BatchSplit.even(64, num_microbatches=4, parts=8))
    assert by_chance.given.replica > 1.15
    assert by_chance.now.replica < 1.02
    assert dealt.now.replica < 1.02
    assert dealt.now.microbatch < 0.8 * dealt.given.microbatch


def test_replicas_of_unlike_devices_get_work_by_their_shares():
    split = BatchSplit.by_shares(12, num_microbatches=1, shares=(2, 1))
    dealt = deal([12] * 4 + [0] * 8, split, (2, 1))
    assert dealt.given.replica == 1.5  # 48 where 32 are its share
    assert dealt.now.replica == 1.125  # 36 of them: shares can't be met by whole samples


@pytest.mark.parametrize("unit", [Unit(), Unit(size=2), Unit(size=4, runs=2)], ids=str)
def test_samples_that_belong_together_change_places_together(unit):
    """Rows of three numbers, of six units; and a label for each unit."""
    rows = torch.arange(6 * unit.size * 3).view(-1, 3)
    meta = TensorMeta(name="x", shape=(Affine(unit.size), 3), dtype="int64", kind="input", fqn="x")
    order = [4, 0, 3, 1, 5, 2]
    places = unit.places(order, 6)
    assert torch.equal(rows_of(rows, meta, order, unit), rows[places])
    assert torch.equal(rows_of(rows, meta, order[2:4], unit), rows[unit.places(order[2:4], 6)])
    label = replace(meta, shape=(Affine(1),))
    assert rows_of(torch.arange(6), label, order, unit).tolist() == order


# ------------------------------------------------------------------------------------ equal to one


class Dataset:
    """Samples of a whole batch, again and again."""

    def __init__(self, size: int) -> None:
        self.batch = batch_of(size)

    def __len__(self) -> int:
        return len(self.batch["ids"])

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {path: tensor[number] for path, tensor in self.batch.items()}


def gaps(name: str, plans: list[Plan], are_parts: bool) -> list[tuple[float, Any]]:
    """Of each plan the largest gap to one process, and how the last batch was dealt."""
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        torch.manual_seed(0)
        module: nn.Module = MODELS[name]()
        alone = OneProcess(module, sgd)
        engine = planner.apply(plan, module, optimizer=sgd(module))
        batches = [batch_of(SAMPLES)] * 2
        parts = iter(engine.loader(Dataset(SAMPLES)))

        def given(engine: Any, batch: Any, parts: Any = parts) -> Any:
            if not are_parts:
                return batch
            part = next(parts, None)
            # (A pass is one batch: the next begins anew.)
            return next(iter(engine.loader(Dataset(SAMPLES)))) if part is None else part

        gap = train_beside(engine, alone, batches, given=given, gap=gap_to_largest)
        found.append((gap.largest, engine.dealt))
        engine.close()
    return found


QUICK = {
    "dp2": {"dp": 2, "num_microbatches": 2, "microbatch_size": 2},
    "pp2": {"pp": 2, "num_microbatches": 2, "microbatch_size": 4},
}
ON_TWO = {
    "dp2-zero3": {"dp": 2, "num_microbatches": 2, "microbatch_size": 2, "zero_stage": 3},
    "cp2": {"cp": 2, "num_microbatches": 2, "microbatch_size": 4},
}
ON_FOUR = {
    "dp2-pp2": {"dp": 2, "pp": 2, "num_microbatches": 2, "microbatch_size": 2},
    "cp2-dp2": {"cp": 2, "dp": 2, "num_microbatches": 2, "microbatch_size": 2},
    "cp2-pp2": {"cp": 2, "pp": 2, "num_microbatches": 2, "microbatch_size": 4},
}


@pytest.mark.parametrize("are_parts", [False, True], ids=["whole", "parts"])
def test_dealt_batches_train_as_one_process_does(are_parts):
    """Losses count tokens, of which samples have several numbers."""
    check_dealt(2, QUICK, are_parts)


@pytest.mark.slow
@pytest.mark.parametrize("are_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize(("ranks", "choices"), [(2, ON_TWO), (4, ON_FOUR)], ids=["two", "four"])
def test_beside_zero_and_on_more_axes(ranks, choices, are_parts):
    check_dealt(ranks, choices, are_parts)


def check_dealt(ranks: int, choices: dict[str, dict[str, Any]], are_parts: bool) -> None:
    plans = [plan_of(**each) for each in choices.values()]
    by_rank = run_ranks(gaps, ranks, "packed", plans, are_parts)
    for at, name in enumerate(choices):
        dealt = {rank[at][1] for rank in by_rank}
        assert max(rank[at][0] for rank in by_rank) < 1e-9, name
        assert len(dealt) == 1, name
        (how,) = dealt
        if name == "cp2":  # parts of one replica, one after the other: none waits
            assert how is None
            continue
        assert how.order is not None, name
        # Four samples of one document, of 2,080 pairs, and four of short ones, of 64 to 127.
        if "dp" in choices[name]:
            assert how.given.replica > 1.24, name
            assert how.now.replica < 1.01, name
        assert how.given.microbatch > 1.23, name
        assert how.now.microbatch < 1.02, name


def gap_of_uneven_parts(plan: Plan) -> tuple[float, Any]:
    """The same of replicas that give parts of five samples and of three."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Packed()
    alone = OneProcess(module, sgd)
    engine = planner.apply(plan, module, optimizer=sgd(module))

    def given(engine: Any, batch: Any) -> planner.OwnPart:
        own = slice(0, 5) if engine.replica == 0 else slice(5, 8)
        return planner.OwnPart({path: tensor[own] for path, tensor in batch.items()})

    gap = train_beside(engine, alone, [batch_of(SAMPLES)] * 2, given=given, gap=gap_to_largest)
    return gap.largest, engine.dealt


@pytest.mark.slow
def test_parts_of_several_sizes_keep_them():
    """All long samples are in the part of five: one of them is dealt to the other replica."""
    plan = plan_of(dp=2, num_microbatches=1, microbatch_size=5)
    by_rank = run_ranks(gap_of_uneven_parts, 2, plan)
    assert max(gap for gap, _ in by_rank) < 1e-9
    (dealt,) = {each for _, each in by_rank}
    assert dealt.order is not None
    assert sum(sample < 5 for sample in dealt.order[:5]) < 5
    assert dealt.now.replica < 1.12 < 1.6 < dealt.given.replica


def orders(plans: dict[str, Plan], folder: str) -> dict[str, Any]:
    """What batches show of the order of their samples, on each rank."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    # A loss that follows from the order, and one from which samples are together in a part.
    for name in ("ordered", "normed"):
        torch.manual_seed(0)
        module: nn.Module = MODELS[name]()
        alone = OneProcess(module, sgd)
        engine = planner.apply(plans[name], module, optimizer=sgd(module))
        gap = train_beside(engine, alone, [batch_of(SAMPLES)] * 2, gap=gap_to_largest)
        found[name] = gap.largest, engine.dealt
        engine.close()
    for is_dealt in (True, False):
        torch.manual_seed(0)
        module = Packed()
        expected = copy.deepcopy(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PLANNER_TIMELINE", f"{folder}/{is_dealt}")
            engine = planner.apply(plans["packed"], module, balance_documents=is_dealt)
        figures: list[dict[str, float]] = []
        said = io.StringIO()
        planner.StepLog(engine, every=1, to=(lambda _, each, to=figures: to.append(each),))
        for size in (SAMPLES, SAMPLES - 1):
            batch = batch_of(size)
            hidden = expected.hidden(batch["ids"], batch["documents"]).detach()
            for run in (engine.evaluate, engine.step):
                with redirect_stderr(said):
                    run(batch, fetch=["norm"])
                gap = gap_to_largest(engine.fetched, {"norm": hidden})
                found[f"{is_dealt}, {size}, {run.__name__}"] = gap, engine.dealt
            expected.load_state_dict(given_by_rank_0(engine))
        engine.close()
        if figures:
            found[f"figures, {is_dealt}"] = figures[0], said.getvalue()
    return found


def given_by_rank_0(engine: Any) -> Any:
    """The engine's weights, on every rank."""
    told = [engine.full_state_dict()]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]


def test_values_come_back_in_the_order_of_the_batch(tmp_path):
    """And logs and timelines say what dealing has come to."""
    plans = {name: plan_of(name, **QUICK["dp2"]) for name in ("packed", "ordered", "normed")}
    first, second = run_ranks(orders, 2, plans, str(tmp_path))
    figures, said = first.pop("figures, True")
    left, nothing = first.pop("figures, False")
    assert not nothing
    assert not any("work" in name for name in left)
    assert {name: dealt for name, (_, dealt) in first.items()} == {
        name: dealt for name, (_, dealt) in second.items()
    }
    gap, dealt = first.pop("ordered")
    assert gap < 1e-9
    assert dealt.order is not None
    assert first.pop("normed")[1] is None
    for name, (gap, dealt) in first.items():
        assert gap < 1e-9, name
        if name.startswith("False"):
            assert dealt is None
        else:
            assert dealt.order is not None, name
    dealt = first[f"True, {SAMPLES}, step"][1]
    assert figures["replica_work"] == dealt.now.replica
    assert figures["replica_work_given"] == dealt.given.replica
    assert figures["microbatch_work"] == dealt.now.microbatch
    assert figures["microbatch_work_given"] == dealt.given.microbatch
    recorded = load_timeline(tmp_path / "True")
    (told,) = dealt_by_work(recorded)
    assert told == first[f"True, {SAMPLES - 1}, step"][1].told
    line = next(span.name for span in recorded[0].spans if span.kind == DEAL)
    assert "fullest replica 1.00 of the mean (1.25 as given)" in line
    assert said == f"planner: {line}\n"  # once
    assert not dealt_by_work(load_timeline(tmp_path / "False"))
