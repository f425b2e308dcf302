"""Samplers of a DataLoader that draw: one order on all ranks, and again after a checkpoint."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import planner
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.draws import drawn_from
from planner.runtime.batches.loader import LoaderWarning
from tests.builders import tiny_models
from tests.captures import capture_tiny
from tests.runtime.data.lockstep import Numbered
from tests.spawn import run_ranks

SAMPLES, BATCH = 12, 4


class Python:
    """A sampler that shuffles with Python's generator, in place."""

    def __iter__(self) -> Any:
        numbers = list(range(SAMPLES))
        random.shuffle(numbers)
        return iter(numbers)

    def __len__(self) -> int:
        return SAMPLES


class OwnOrder:
    """A sampler whose order each rank has by itself."""

    def __iter__(self) -> Any:
        return iter(range(SAMPLES) if dist.get_rank() else range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


class Batches(BatchSampler):
    """Batches of another class than PyTorch's, which are given as they are."""


def made(kind: str) -> DataLoader[Any]:
    data: Any = Numbered(SAMPLES)
    own = torch.Generator().manual_seed(dist.get_rank())
    samplers: dict[str, Any] = {
        "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
        "own generator": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=own),
        "subset": lambda: SubsetRandomSampler(range(SAMPLES)),
        "python": Python,
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=8),
        "own order": OwnOrder,
        "dealt": lambda: DistributedSampler(data, num_replicas=2, rank=dist.get_rank()),
    }
    if kind == "batches":
        inner = SubsetRandomSampler(range(SAMPLES), generator=own)
        return DataLoader(data, batch_sampler=Batches(inner, BATCH, drop_last=True))
    return DataLoader(data, batch_size=BATCH, sampler=samplers[kind]())


def passes(plan: Plan, kinds: list[str]) -> list[Any]:
    """Of each kind of sampler: the samples this rank was given in two passes, and those after a
    loader was put where another was in the second; or what was raised.
    """
    engine = planner.apply(plan, tiny_models()["mlp"].build())
    torch.manual_seed(dist.get_rank())  # as scripts that seed their ranks apart
    random.seed(dist.get_rank())
    found: list[Any] = []
    for kind in kinds:
        try:
            loader = engine.loader(made(kind))
            given: list[list[int]] = []
            for _ in range(2):
                for part in loader:
                    given.append(part.batch[0][:, 0].int().tolist())
                    if len(given) == len(loader) + 1:
                        position = loader.state_dict()
            again = engine.loader(made(kind))
            again.load_state_dict(position)
            found.append((given, [part.batch[0][:, 0].int().tolist() for part in again]))
        except PlannerError as error:
            found.append(str(error))
    engine.close()
    return found


def plan_of(**layout: int) -> Plan:
    return default_plan(capture_tiny("mlp"), num_microbatches=1, **layout)


DRAWN = ["weighted", "own generator", "subset", "python", "replacement", "batches"]


def test_what_a_sampler_draws_is_one_order_on_all_ranks():
    """Each rank had its own order: replicas trained on some samples twice, and on others never."""
    ranks = run_ranks(passes, 2, plan_of(dp=2, microbatch_size=2), DRAWN)
    (alone,) = run_ranks(passes, 1, plan_of(microbatch_size=4), DRAWN)
    for kind, first, second, (whole, rest) in zip(DRAWN, *ranks, alone, strict=True):
        assert [a + b for a, b in zip(first[0], second[0], strict=True)] == whole, kind
        count = 2 if kind == "replacement" else 3
        assert len(whole) == 2 * count
        assert whole[:count] != whole[count:], f"{kind}: both passes have one order"
        if kind in ("subset", "python", "batches"):
            assert sorted(n for part in whole[:count] for n in part) == list(range(SAMPLES))
        assert rest == whole[count + 1 :], f"{kind}: another order after a checkpoint"


def test_ranks_with_other_orders_are_told():
    for found in run_ranks(passes, 2, plan_of(dp=2, microbatch_size=2), ["own order", "dealt"]):
        assert found[0].startswith("ranks have other samples in one global batch, so replicas")
        assert "has a DistributedSampler of 2 replicas and the loader deals samples" in found[1]


def test_samples_that_are_trained_on_twice_are_told():
    """A DataLoader without drop_last ends a pass with a smaller batch."""
    engine = planner.apply(plan_of(microbatch_size=8), tiny_models()["mlp"].build())
    data: Any = Numbered(SAMPLES)
    with pytest.warns(LoaderWarning, match="12 samples ends with 4 that .* of 8; .* so 4 samples"):
        engine.loader(DataLoader(data, batch_size=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.loader(DataLoader(data, batch_size=8), at_end="short")
        engine.loader(DataLoader(data, batch_size=8, drop_last=True))
        engine.loader(DataLoader(data, batch_sampler=Batches(range(SAMPLES), 8, drop_last=False)))
        engine.loader(data)
    dist.destroy_process_group()


def test_the_scripts_generators_stay():
    before = torch.get_rng_state(), random.getstate()
    assert sorted(drawn_from(Python(), 1)) == list(range(SAMPLES))
    assert list(drawn_from(Python(), 1)) == list(drawn_from(Python(), 1))
    assert list(drawn_from(Python(), 1)) != list(drawn_from(Python(), 2))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
