"""M4 (shards of a dataset, wrapped around; tp peers get equal batches), D13 and P22 (inputs
reach only the stages that need them)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

import planner
from planner.errors import ModelError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.inputs.feed import Preamble
from planner.runtime.batches.sampler import ShardedSampler
from tests.builders import PlainGPT, gpt_batch
from tests.runtime.scenarios import capture
from tests.spawn import run_ranks


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_shards"), [(12, 2, 3), (13, 2, 3), (7, 4, 2), (2, 4, 3)]
)
def test_shards_cover_the_data_once_and_wrap_around(num_samples, batch_size, num_shards):
    """M4: odd sizes begin again from the front; all shards have the same whole batches."""
    shards = [
        ShardedSampler(
            num_samples, batch_size=batch_size, num_shards=num_shards, shard_id=s, seed=3
        )
        for s in range(num_shards)
    ]
    drawn = [list(shard) for shard in shards]
    assert {len(d) for d in drawn} == {len(shards[0])}
    assert len(drawn[0]) % batch_size == 0
    counts = Counter(i for d in drawn for i in d)
    assert set(counts) == set(range(num_samples))
    # No more is read again than fills the batches, and nothing twice as often as need be.
    assert sum(counts.values()) - num_samples < batch_size * num_shards
    assert max(counts.values()) - min(counts.values()) <= 1
    if num_samples % (batch_size * num_shards) == 0:
        assert set(counts.values()) == {1}


def test_orders_differ_by_epoch_and_seed_and_not_by_random_state():
    """M4."""
    sampler = ShardedSampler(50, seed=1)
    first = list(sampler)
    random.seed(5)
    torch.manual_seed(5)
    assert list(sampler) == first == list(ShardedSampler(50, seed=1))
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(ShardedSampler(50, seed=2)) != first
    assert list(ShardedSampler(3, shuffle=False)) == [0, 1, 2]
    with pytest.raises(ModelError, match="shard_id=2 is not one of the 2 shards; use 0 to 1"):
        ShardedSampler(3, num_shards=2, shard_id=2)
    with pytest.raises(ModelError, match="must both be at least 1"):
        ShardedSampler(0)


def load_and_step(plans: list[Plan]) -> list[tuple[list[int], list[str], float]]:
    """For each plan: the tokens this rank's loader gave, the inputs its stages take, the loss."""
    rank = torch.distributed.get_rank()
    answers = []
    for plan in plans:
        torch.manual_seed(0)
        module = PlainGPT()
        torch.manual_seed(rank)  # as scripts that seed their ranks apart
        data = gpt_batch(11)
        samples = [{k: v[i] for k, v in data.items()} for i in range(11)]
        sampler = ShardedSampler(11, batch_size=plan.global_batch)
        loader = DataLoader(samples, batch_size=plan.global_batch, sampler=sampler)
        engine = planner.apply(plan, module)
        given, losses = [], []
        for batch in loader:
            given += batch["ids"].flatten().tolist()
            losses.append(engine.step(batch).item())
        readers = [reader for _, reader in engine.state.readers]
        inputs = [n for each in readers if isinstance(each, Preamble) for n in each.inputs]
        paths = [engine.graph.tensor[n].fqn for n in inputs]
        answers.append((given, paths, sum(losses)))
    return answers


def test_ranks_load_alike_and_stages_take_what_they_need():
    """M4: equal batches on tp peers; D13, P22: ids to the first stage, labels to the last."""
    plans = [
        default_plan(capture("gpt"), tp=2, num_microbatches=2, microbatch_size=2),
        default_plan(capture("gpt"), pp=2, num_microbatches=4),
    ]
    (on_tp, on_pp), (peer_on_tp, peer_on_pp) = run_ranks(load_and_step, 2, plans)
    assert on_tp == peer_on_tp
    assert on_tp[0] == on_pp[0] == peer_on_pp[0]
    assert on_pp[1] == ["ids"]
    assert peer_on_pp[1] == ["labels"]
    assert on_pp[2] == peer_on_pp[2] == pytest.approx(on_tp[2], rel=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_pass_goes_on_where_training_was(num_shards):
    """On another number of shards than before: 12 of 4 + 20 samples in batches of 4."""

    def passes(shards: int, start: int, epochs: int) -> list[int]:
        samplers = [
            ShardedSampler(18, batch_size=4 // shards, num_shards=shards, shard_id=at)
            for at in range(shards)
        ]
        found = []
        first = {sampler.start_at(start) for sampler in samplers}.pop()
        for epoch in range(first, epochs):
            if epoch > first:
                for sampler in samplers:
                    sampler.set_epoch(epoch)
            rounds = zip(*samplers, strict=True)
            found += [index for each in rounds for index in each]
        return found

    whole = passes(1, 0, 3)
    assert len(whole) == 3 * 20
    assert passes(num_shards, 12, 3) == whole[12:]
    assert passes(num_shards, 32, 3) == whole[32:]
