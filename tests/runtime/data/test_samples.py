"""Parts made of samples: what is drawn for them, how they are filled up, how streams are read."""

from __future__ import annotations

import random
from itertools import islice

import numpy
import pytest
import torch
from torch.utils.data import Subset

from planner.errors import ModelError
from planner.language.graph.batch_split import BatchSplit
from planner.runtime.batches.draws import draw_from, generators_kept
from planner.runtime.batches.samples import (
    Collate,
    MapParts,
    PartKey,
    as_it_is,
    fill_up,
)
from planner.runtime.batches.streams import ShardedStream, WholeStream, places_of, read

X = Collate(make=lambda samples: {"x": torch.tensor(samples)}, reads=frozenset({"x"}))


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_what_is_drawn_follows_from_numbers_and_the_scripts_generators_stay():
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    with generators_kept():
        expected = drawn()
    found = []

    def draw_and_fail() -> None:
        with generators_kept():
            for numbers in ((1, 2), (1, 2), (2, 1)):
                draw_from(*numbers)
                found.append(drawn())
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[2], strict=True))
    assert drawn() == expected


class Noisy:
    def __getitem__(self, number):
        return float(torch.rand(()) + number)


def key(*places: int) -> PartKey:
    return PartKey(epoch=1, whole=8, order=0, places=places, numbers=[10 * p for p in places])


class Many(Noisy):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


@pytest.mark.parametrize(
    "data", [Noisy(), Subset(Noisy(), range(40)), Subset(Subset(Noisy(), range(40)), range(40))]
)
def test_a_sample_is_the_same_in_whichever_part_it_is_read(data):
    parts = MapParts(data, 3, X)
    whole = parts[key(0, 1, 2, 3)]
    assert whole.whole == 8
    rest = parts[key(2, 3)].batch["x"]
    assert torch.equal(whole.batch["x"][2:], rest)
    other = MapParts(data, 4, X)[key(2, 3)].batch["x"]
    assert not torch.equal(other, rest)


def test_samples_that_are_read_together_draw_together():
    found = [MapParts(data, 3, X)[key(2, 3)].batch["x"] for data in (Noisy(), Many())]
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_what_the_rank_does_not_read_goes_no_farther_and_is_marked():
    make = Collate(make=None, reads=frozenset({"0"}))
    samples = [(torch.ones(2), torch.zeros(3)) for _ in range(2)]
    part = as_it_is(make(samples))
    assert part.batch[0].shape == (2, 2)
    assert part.batch[1] is None
    assert set(part.marks) == {"0", "1"}


def test_samples_are_filled_up_to_the_largest_in_each_dim():
    samples = [{"ids": [1, 2, 3], "w": torch.ones(1, 2)}, {"ids": [4], "w": torch.ones(2, 1)}]
    found = fill_up(samples, {"ids": -1, "w": 0.5})
    assert found["ids"].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert found["w"].tolist() == [[[1, 1], [0.5, 0.5]], [[1, 0.5], [1, 0.5]]]
    assert samples[1]["ids"] == [4]
    assert fill_up([(1, None), (2, None)], {"0": 0})[0].tolist() == [1, 2]
    with pytest.raises(ModelError, match=r"ids of several shapes, such as \(3,\) and \(3,\)|w of"):
        fill_up(samples, {"ids": -1})
    with pytest.raises(ModelError, match="some samples have w and others do not"):
        fill_up([samples[0], {"ids": [4]}], {"ids": -1})
    with pytest.raises(ModelError, match="ids of several numbers of dims"):
        fill_up([{"ids": [[4]]}, {"ids": [4]}], {"ids": -1})


def stream(count: int, at_end, *, replica: int = 0, start: int = 0, data=None) -> list[list[int]]:
    """The parts of a replica of two, of batches of four samples in two microbatches."""
    parts = WholeStream(
        range(count) if data is None else data,
        collate=X,
        split=BatchSplit.even(4, num_microbatches=2, parts=2),
        least=2,
        replicas=(2, replica),
        at_end=at_end,
        seed=0,
        epoch=0,
        start=start,
    )
    return [part.batch["x"].tolist() for part in parts]


def test_a_stream_is_dealt_by_the_places_of_microbatches():
    split = BatchSplit.even(4, num_microbatches=2, parts=2)
    assert [places_of(split, 2, number) for number in range(2)] == [[0, 2], [1, 3]]
    assert stream(6, "wrap", replica=1) == [[1, 3], [5, 1]]
    assert stream(6, "drop") == [[0, 2]]
    assert stream(7, "wrap", start=4) == [[4, 6]]
    assert stream(5, "short") == [[0, 2]]  # one sample is no batch of two microbatches
    assert stream(8, "wrap") == [[0, 2], [4, 6]]
    assert stream(1, "wrap") == [[0, 0]]


@pytest.mark.parametrize("at_end", ["wrap", "drop", "short"])
def test_data_without_a_sample_are_refused(at_end):
    with pytest.raises(ModelError, match="the data gave no sample"):
        stream(0, at_end)


def test_samples_passed_over_are_read_and_draw_as_ever():
    class Shuffled:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for number in range(5):
                yield self.epoch + number + torch.rand(()).item()

    with generators_kept():
        whole = list(read(Shuffled(), 1, 10, 0))
        assert list(read(Shuffled(), 1, 10, 0, skip=3)) == whole[3:]
        assert list(read(Shuffled(), 1, 10, 0, skip=7)) == []
    assert [int(each) for each in whole] == [10, 11, 12, 13, 14]


class Shards:
    """Sample 10 s + i is sample i of shard s."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def shard(self, *, num_shards: int, index: int):
        assert num_shards == len(self.lengths)
        return range(10 * index, 10 * index + self.lengths[index])


def sharded(data: Shards, at_end, *, progress=None, replica: int = 0) -> ShardedStream:
    return ShardedStream(
        data,
        collate=X,
        num_shards=len(data.lengths),
        samples=2,
        least=1,
        replicas=(2, replica),
        at_end=at_end,
        seed=0,
        epoch=0,
        progress=progress or {},
    )


def told(parts) -> list[tuple[list[int], dict[int, int], bool]]:
    return [(part.batch["x"].tolist(), dict(part.progress), part.has_ended) for part in parts]


def test_the_shard_of_which_the_least_was_read_is_next():
    data = Shards(2, 9, 3)  # this replica has shards 0 and 2
    whole = told(sharded(data, "short"))
    assert whole == [
        ([0, 20], {0: 1, 2: 1}, False),
        ([1, 21], {0: 2, 2: 2}, False),
        ([22], {2: 3}, False),
    ]
    assert told(sharded(data, "short", progress={0: 1, 2: 1})) == whole[1:]
    assert told(sharded(data, "drop")) == whole[:2]


def test_what_wraps_says_when_all_was_given_before():
    found = told(islice(sharded(Shards(1, 9, 2), "wrap"), 3))
    assert found == [
        ([0, 20], {0: 1, 2: 1}, False),
        ([21, 0], {2: 2}, False),
        ([20, 21], {}, True),
    ]


def test_shards_without_a_sample_are_refused_instead_of_read_for_ever():
    with pytest.raises(ModelError, match=r"shards \[0, 2\] of the data have no sample"):
        told(sharded(Shards(0, 9, 0), "wrap"))
