"""No sample is lost or read twice, whatever dp a pass goes on under (M4, N19)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from planner.errors import ModelError, PlanError
from planner.runtime.batches.order import Order
from tests.runtime.data.lockstep import Counted, Numbered, Sharded, plan_of, run

BATCH = 24


def _plan(dp: int):
    return plan_of(dp, batch=BATCH, microbatches=2)


def _flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_pass_goes_on_under_any_dp(monkeypatch, kind, seed):
    """From one dp to another and to a third: the same batches as in one process, in order."""
    draw = random.Random(f"{kind} {seed}")
    count = draw.randrange(BATCH * 3, BATCH * 7)
    at_end = draw.choice(["wrap", "drop", "short"])
    if at_end == "short" and 0 < count % BATCH < 12:
        count += 12
    data = Numbered(count) if kind == "map" else Counted(0, count)
    options = {"at_end": at_end, "seed": seed} | ({"shuffle": True} if kind == "map" else {})
    whole, _ = run(monkeypatch, data, _plan(1), **options)
    first, second, third = (draw.choice([1, 2, 3, 4, 6]) for _ in range(3))
    found, state = run(monkeypatch, data, _plan(first), steps=draw.randrange(1, 3), **options)
    more, state = run(monkeypatch, data, _plan(second), steps=1, state=state, **options)
    rest, state = run(monkeypatch, data, _plan(third), state=state, **options)
    assert found + more + rest == whole
    assert (state["epoch"], state["samples"]) == (1, 0)
    counts = Counter(_flat(whole))
    match at_end:
        case "wrap":
            assert set(counts) == set(range(count))
            assert sum(counts.values()) == -(-count // BATCH) * BATCH
        case "drop":
            assert sum(counts.values()) == count // BATCH * BATCH
            assert set(counts.values()) == {1}
        case "short":
            assert sorted(_flat(whole)) == list(range(count))


@pytest.mark.parametrize("seed", range(6))
def test_shards_go_on_under_any_dp_that_divides_them(monkeypatch, seed):
    """Of a stream of shards each sample once, though other replicas read them afterwards."""
    draw = random.Random(seed)
    lengths = [draw.randrange(20, 40) for _ in range(12)]
    data, at_end = Sharded(*lengths), draw.choice(["wrap", "drop"])
    first, second = draw.choice([1, 2, 3]), draw.choice([4, 6, 2])
    found, state = run(monkeypatch, data, _plan(first), steps=5, at_end=at_end)
    rest, _ = run(monkeypatch, data, _plan(second), state=state, at_end=at_end)
    before, counts = _flat(found), Counter(_flat(found + rest))
    assert len(set(before)) == len(before) == sum(state["shards"].values()) == 5 * BATCH
    if at_end == "wrap":
        assert set(counts) == set(range(sum(lengths)))
        # What is read again is what a replica reads while others are not done.
        assert all(n == 1 for n in Counter(_flat(rest[:3])).values())
    else:
        assert set(counts.values()) == {1}
        assert len(counts) > sum(lengths) - 12 * 40


def test_a_pass_that_was_broken_off_goes_on_and_the_next_has_another_order(monkeypatch):
    plan, data = _plan(2), Numbered(BATCH * 2)
    first, state = run(monkeypatch, data, plan, shuffle=True)
    second, state = run(monkeypatch, data, plan, shuffle=True, state=state)
    assert state["epoch"] == 2
    assert first != second
    assert sorted(_flat(first)) == sorted(_flat(second)) == list(range(BATCH * 2))
    assert run(monkeypatch, data, plan, shuffle=True, seed=1)[0] != first


def test_positions_in_other_data_are_refused(monkeypatch):
    plan = _plan(2)
    _, state = run(monkeypatch, Numbered(BATCH * 2), plan, steps=1)
    with pytest.raises(PlanError, match=r"position is one in samples=48, .* this loader reads sam"):
        run(monkeypatch, Numbered(BATCH * 3), plan, state=state)
    _, state = run(monkeypatch, Sharded(30, 30), plan, steps=1)
    with pytest.raises(PlanError, match=r"in shards=2, .* reads shards=0, .* a multiple of dp"):
        run(monkeypatch, Sharded(30, 30), _plan(3), state=state)


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (Numbered(30), {"at_end": "short"}, "a last batch of 6 of the 30 samples, .* 'drop'"),
        (Numbered(9), {"at_end": "drop"}, "9 samples, which make no batch of 24"),
        (
            Numbered(30),
            {"at_end": "stop"},
            "at_end='stop' is no end of a pass; use 'wrap', 'drop', 'short'",
        ),
        (iter([1, 2]), {}, "a list_iterator, which can be read once"),
        (Counted(0, 50), {"shuffle": True}, "shuffle=True needs a dataset"),
        (7, {}, "the data are a int, with neither"),
    ],
)
def test_data_that_cannot_be_dealt_are_refused(monkeypatch, data, options, says):
    with pytest.raises(ModelError, match=says):
        run(monkeypatch, data, _plan(4), **options)


def test_an_empty_iterable_is_refused(monkeypatch):
    with pytest.raises(ModelError, match="the data gave no sample"):
        run(monkeypatch, Counted(0, 0), _plan(2))


def test_batches_of_a_sampler_are_taken_as_they_are():
    """A sampler that puts samples of like length together gives global batches of its own."""
    given = [[0, 5, 1, 4], [2, 3, 6]]
    order = Order(
        num_samples=7, batch=4, least=2, at_end="wrap", sampler=given, batches_of_sampler=True
    )
    assert list(order.batches(0, 0)) == [(0, given[0]), (4, given[1])]
    assert list(order.batches(0, 4)) == [(4, given[1])]
    bad = Order(
        num_samples=7, batch=4, least=2, at_end="wrap", sampler=[[1]], batches_of_sampler=True
    )
    with pytest.raises(ModelError, match=r"the batch sampler gave 1 samples; .* 2 to 4"):
        list(bad.batches(0, 0))
