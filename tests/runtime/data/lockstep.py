"""Loaders of all ranks of a plan in one process, a thread for each; only messages are stood in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.inputs import agreement
from planner.runtime.batches.inputs.feeder import Feeder, Shaped
from planner.runtime.batches.loader import Loader
from tests.captures import capture_tiny
from tests.runtime.alone import Parts


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample of the model "mlp" that says its number."""
    return torch.full((8,), float(number)), torch.zeros(4)


class Numbered:
    """A dataset of so many samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return sample(number)


class Counted:
    """An iterable of samples `first` to `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __iter__(self) -> Any:
        return map(sample, range(self.first, self.last))


class Sharded:
    """A stream of shards of these lengths, which are asked for as those of `datasets` are."""

    def __init__(self, *lengths: int) -> None:
        self.bounds = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
        self.num_shards = len(lengths)

    def __iter__(self) -> Any:
        return iter(Counted(0, self.bounds[-1]))

    def shard(self, *, num_shards: int, index: int) -> Any:
        assert num_shards == self.num_shards
        return Counted(self.bounds[index], self.bounds[index + 1])


def plan_of(dp: int, *, batch: int, microbatches: int) -> Plan:
    return default_plan(
        capture_tiny("mlp"),
        dp=dp,
        num_microbatches=microbatches,
        microbatch_size=batch // dp // microbatches,
    )


def run(
    monkeypatch: Any,
    data: Any,
    plan: Plan,
    *,
    steps: int | None = None,
    state: Any = None,
    **options: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the samples of each batch of the pass under way, and the position then.

    At most so many `steps` are made; equal positions are found on all ranks.
    """
    world, graph = plan.dp, capture_tiny("mlp")
    barrier = threading.Barrier(world)
    said: list[Any] = [None] * world

    def together(rank: int, work: Callable[[], Any]) -> list[Any]:
        try:
            said[rank] = work()
        except Exception as error:
            said[rank] = error
        barrier.wait(20)
        everything = list(said)
        barrier.wait(20)
        for each in everything:
            if isinstance(each, Exception):
                raise each
        return everything

    monkeypatch.setattr(agreement, "together", together)
    found: list[Any] = [None] * world

    def of_rank(rank: int) -> None:
        mesh: Any = Parts({"batch": world}, {"batch": rank})
        mesh = SimpleNamespace(
            size=mesh.size,
            rank=mesh.rank,
            device=mesh.device,
            control=rank,
            global_rank=rank,
            is_first_of_samples=True,
        )
        weights: Any = SimpleNamespace(
            tells=False, reads=lambda paths: frozenset(), names=lambda bucket: frozenset()
        )
        preamble: Any = SimpleNamespace(inputs=graph.batch_inputs)
        feeder = Feeder(
            [Shaped(graph, {0: preamble})],
            plan,
            mesh,
            pad={},
            side_inputs={},
            loss_weights=weights,
        )
        loader = Loader(plan, mesh, feeder, data, **options)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for number, part in enumerate(loader):
            batches.append((part.batch[0][:, 0].long().tolist(), part.agreed.split))
            if number + 1 == steps:
                break
        found[rank] = batches, loader.state_dict()

    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            of_rank(rank)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next(e for e in failures if not isinstance(e, threading.BrokenBarrierError))
    states = [each[1] for each in found]
    assert all(each == states[0] for each in states)
    together_seen = zip(*(each[0] for each in found), strict=True)
    return [_whole(by_rank) for by_rank in together_seen], states[0]


def _whole(by_rank: tuple[Any, ...]) -> list[int]:
    """Put the parts of a batch together again, in the order of its split."""
    split = by_rank[0][1]
    whole: list[int] = []
    for m in range(split.num_microbatches):
        for rank, (samples, own) in enumerate(by_rank):
            assert own == split
            run = split.own(len(by_rank), rank)[m]
            whole += samples[run.start : run.stop]
    assert len(whole) == split.num_samples == sum(len(samples) for samples, _ in by_rank)
    return whole
