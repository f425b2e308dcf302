"""Data whose samples belong together: dealt in whole units, as one DataLoader has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import planner
from planner.errors import ModelError, PlanError
from planner.language.graph import Unit
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.loader import _collate_of
from planner.runtime.batches.order import Order
from planner.runtime.batches.sampler import ShardedSampler
from tests import units
from tests.runtime.beside import OneProcess, sgd
from tests.runtime.test_units import capture
from tests.spawn import run_ranks
from tests.units import Body, batch, build

SAMPLES = 20


class Samples(Dataset[Any]):
    """Each is one sample of the batch."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.data, self.count = batch(count, torch.float64), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: tensor[number] for name, tensor in self.data.items()}


class Pairs(Samples):
    """Each is a pair of samples, which `stacked` puts in two halves."""

    def __len__(self) -> int:
        return self.count // 2

    def __getitem__(self, number: int) -> Any:
        return [super(Pairs, self).__getitem__(2 * number + place) for place in range(2)]


class Stream(IterableDataset[Any]):
    """The same data from front to back, or by shard."""

    def __init__(self, data: Samples, first: int = 0, step: int = 1) -> None:
        self.data, self.first, self.step = data, first, step

    def __iter__(self) -> Any:
        return (self.data[number] for number in range(self.first, len(self.data), self.step))


class Shards(Stream):
    num_shards = 2

    def shard(self, *, num_shards: int, index: int) -> Stream:
        return Stream(self.data, index, num_shards)


def stacked(pairs: list[Any]) -> Any:
    return default_collate([one for one, _ in pairs] + [other for _, other in pairs])


def side_by_side(pairs: list[Any]) -> Any:
    return default_collate([sample for pair in pairs for sample in pair])


@dataclass(frozen=True)
class Case:
    """What a loader reads, and the samples of the data in a batch of one process."""

    body: str
    data: Callable[[], Any]
    each: int
    collate: Callable[[list[Any]], Any] | None = None
    is_loader: bool = False
    options: dict[str, Any] = field(default_factory=dict)


DROP, SHORT = {"at_end": "drop"}, {"at_end": "short"}
CASES = [
    Case("chunked", Samples, 8, options=DROP),
    Case("strided", Samples, 8, is_loader=True, options=DROP),
    Case("strided", lambda: Stream(Samples()), 8, options=DROP),
    Case("chunked", lambda: Stream(Samples()), 8, options=DROP),
    Case("chunked", lambda: Pairs(24), 4, stacked, options=SHORT),
    Case("chunked", lambda: Pairs(24), 4, stacked, is_loader=True),
    Case("strided", lambda: Pairs(24), 4, side_by_side, options=SHORT),
    Case("chunked", lambda: Stream(Pairs()), 4, stacked, options=DROP),
]


def gaps(plans: dict[str, Plan]) -> list[tuple[float, int]]:
    """Of each case the largest gap of a loss to one process's, and the steps."""
    torch.set_default_dtype(torch.float64)
    return [_gap_of(plans[case.body], case) for case in CASES]


def _gap_of(plan: Plan, case: Case) -> tuple[float, int]:
    module = build(getattr(units, case.body))
    alone = OneProcess(module, sgd)
    engine = planner.apply(plan, module, optimizer=sgd(module))
    drop = case.options.get("at_end") == "drop"
    usual: Any = DataLoader(
        case.data(), batch_size=case.each, collate_fn=case.collate, drop_last=drop
    )
    given, options = (usual, {}) if case.is_loader else (case.data(), {"collate_fn": case.collate})
    loader = engine.loader(given, **options, **case.options)
    worst, steps, seen = 0.0, 0, 0
    for part, whole in zip(loader, usual, strict=True):
        worst = max(worst, abs(engine.step(part).item() / alone.step(whole) - 1))
        steps, seen = steps + 1, seen + len(whole["x"])
        assert engine.samples == seen
    assert loader.epoch == 1
    return worst, steps


def _plan(body: Body) -> Plan:
    # Eight samples a step: two replicas of two microbatches of a pair.
    return default_plan(capture(body), dp=2, num_microbatches=2, microbatch_size=2)


def test_data_are_dealt_in_whole_units():
    """One of the data may be a sample or a pair: from a dataset, a DataLoader or a stream."""
    plans = {body.__name__: _plan(body) for body in (units.chunked, units.strided)}
    for case, (gap, steps) in zip(CASES, run_ranks(gaps, 2, plans)[0], strict=True):
        assert gap < 1e-10, case
        assert steps == (2 if case.options == DROP else 3), case


def test_what_does_not_come_in_whole_units():
    """Refused by name, as one process would fail on such a batch, or pair other samples."""
    said = run_ranks(refusals, 1, _plan_alone(units.chunked), _plan_alone(units.groups))[0]
    assert said == [
        "at_end='short' leaves a last batch of 5 samples, and 2 belong together; choose 'wrap' or "
        "'drop', or give a multiple of them",
        "the DataLoader has batch_size=6 and the plan's global batch is 8; give it that "
        "batch_size, or search with `global_batch`=6",
        "the collate_fn makes 3 samples of each of the data, and samples belong together in groups "
        "of 4 neighbours; make 1 or 4 of each",
        "rank 0: the data end with a batch of 5 samples, and 2 belong together; choose "
        "at_end='wrap' or 'drop'",
        "shards: 0 of samples, 2 of pairs",
    ]


def refusals(pairs: Plan, of_four: Plan) -> list[str]:
    torch.set_default_dtype(torch.float64)
    engine, said = planner.apply(pairs, build(units.chunked)), []

    def note(make: Callable[[], Any]) -> None:
        with pytest.raises((ModelError, PlanError)) as refused:
            make()
        said.append(str(refused.value))

    note(lambda: engine.loader(Samples(13), at_end="short"))
    note(lambda: engine.loader(DataLoader(Samples(), batch_size=6)))
    groups = planner.apply(of_four, build(units.groups))

    def thrice(samples: list[Any]) -> Any:
        return default_collate([sample for sample in samples for _ in range(3)])

    note(lambda: groups.loader(Samples(), collate_fn=thrice))
    note(lambda: list(engine.loader(Stream(Samples(13)), at_end="short")))
    of_samples = engine.loader(Shards(Samples()))._num_shards
    of_pairs = engine.loader(Shards(Pairs()), collate_fn=stacked)._num_shards
    return [*said, f"shards: {of_samples} of samples, {of_pairs} of pairs"]


def _plan_alone(body: Body) -> Plan:
    return default_plan(capture(body), num_microbatches=1, microbatch_size=8)


def test_places_of_units_in_a_batch():
    """Neighbours of a unit stay neighbours; of runs each has its own part."""
    assert Unit(size=2).places([1, 2], 4) == [2, 3, 4, 5]
    assert Unit(size=2, runs=2).places([1, 2], 4) == [1, 2, 5, 6]
    assert Unit(size=4, runs=2).places([0], 2) == [0, 1, 4, 5]


def test_batches_of_a_sampler_hold_whole_units():
    """One that does not is refused when it comes."""
    order = Order(
        num_samples=20, batch=8, least=4, at_end="wrap", sampler=[[0, 1, 2, 3], [4, 5, 6, 7, 8]],
        batches_of_sampler=True, together=2,
    )  # fmt: skip
    batches = order.batches(0, 0)
    assert next(batches) == (0, [0, 1, 2, 3])
    with pytest.raises(ModelError, match="gave 5 samples, and 2 belong together"):
        next(batches)


def test_a_batch_sampler_leaves_the_collate_fn():
    """A DataLoader with one has no batch size, and puts samples together all the same."""
    given = DataLoader(Pairs(), batch_sampler=[[0, 1], [2, 3]], collate_fn=stacked)
    assert _collate_of(given) is stacked
    assert _collate_of(DataLoader(Pairs(), batch_size=None)) is None


def test_a_sharded_sampler_deals_neighbours_together():
    """Each pair goes to one shard, in its order; all samples come once."""
    shards = [
        list(ShardedSampler(12, batch_size=2, num_shards=3, shard_id=shard, seed=1, together=2))
        for shard in range(3)
    ]
    assert sorted(number for shard in shards for number in shard) == list(range(12))
    for shard in shards:
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(shard[::2], shard[1::2], strict=True))
    with pytest.raises(ModelError, match="together=2 must divide num_samples=5"):
        ShardedSampler(5, together=2)
