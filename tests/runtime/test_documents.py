"""B12: packed documents are dealt by work to replicas and microbatches, and training stays what one
process computes of the whole batch, in fp64."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import planner
from planner.language.across.cut.documents import document_work
from planner.language.graph import ModelGraph
from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.inputs.dealing import deal, imbalance
from planner.runtime.batches.inputs.documents import Documents, pairs_of
from planner.runtime.batches.inputs.feed import cut_batch
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, sgd, train_beside
from tests.runtime.packed import Normed, Ordered, Packed, batch_of
from tests.spawn import run_ranks

SAMPLES = 8
MODELS = {"packed": Packed, "ordered": Ordered, "normed": Normed}


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


@pytest.mark.parametrize("low, high", [(0, None), (0, 3), (None, None), (-2, 2), (None, 0), (1, 4)])
def test_pairs_of_a_document_are_counted(low, high):
    for length in range(10):
        pairs = sum(
            (low is None or q - k >= low) and (high is None or q - k <= high)
            for q in range(length)
            for k in range(length)
        )
        assert pairs_of(torch.tensor([length]), low, high).item() == pairs


def test_work_is_the_pairs_that_the_mask_lets_through():
    """Two layers of two heads of width 4: of a pair 2 * (4 + 4) flop in each head and layer."""
    plan = plan_of(dp=2, num_microbatches=1, microbatch_size=4)
    told = Documents((captured("packed"),), plan, pad={})
    batch = batch_of(SAMPLES)
    documents = batch["documents"]
    sees = (documents[:, :, None] == documents[:, None, :]).tril()
    found = told.work(cut_batch(batch, captured("packed"), plan), range(SAMPLES))
    assert found == tuple((sees.sum((1, 2)) * 64).tolist())


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
        assert dealt.given == imbalance(work, split, range(samples))
        if dealt.order is None:
            assert dealt.now == dealt.given
            continue
        assert sorted(dealt.order) == list(range(samples))
        assert dealt.now == imbalance(work, split, dealt.order)
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
    dealt = deal([12] * 4 + [0] * 8, split)
    assert dealt.given.replica == pytest.approx(1.5)  # all work where 8 of 12 samples are
    assert dealt.now.replica < 1.26  # 3 + 1 of 4: shares of 8 : 4 can't be met by whole samples


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
@pytest.mark.parametrize("ranks, choices", [(2, ON_TWO), (4, ON_FOUR)], ids=["two", "four"])
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
        # Four samples of one document, of 136 pairs, and four of short ones, of 16 to 31.
        if "dp" in choices[name]:
            assert how.given.replica > 1.35, name
            assert how.now.replica < 1.05, name
        assert how.given.microbatch > 1.3, name
        assert how.now.microbatch < 1.07, name
