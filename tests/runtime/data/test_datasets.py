"""Streams and tables of the `datasets` library itself, not of stand-ins (M4, N19)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.runtime.data.lockstep import plan_of, run

BATCH = 24
SHARDS = [29, 25, 31, 27, 24, 30]


def _plan(dp: int) -> Any:
    return plan_of(dp, batch=BATCH, microbatches=2)


def _collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches of the model "mlp" that say their samples' numbers."""
    numbers = torch.tensor([float(sample["number"]) for sample in samples])
    return numbers.unsqueeze(1).expand(-1, 8).clone(), torch.zeros(len(samples), 4)


def _numbers(bounds: list[tuple[int, int]]) -> Any:
    for first, last in bounds:
        for number in range(first, last):
            yield {"number": number}


def _stream() -> Any:
    datasets = pytest.importorskip("datasets")
    ends = [sum(SHARDS[: at + 1]) for at in range(len(SHARDS))]
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    stream = datasets.IterableDataset.from_generator(_numbers, gen_kwargs={"bounds": bounds})
    assert stream.num_shards == len(SHARDS)
    return stream


def _flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("dp", [(1, 2), (2, 3), (3, 1), (2, 6)])
def test_a_stream_goes_on_under_another_dp(monkeypatch: Any, dp: tuple[int, int]) -> None:
    stream = _stream()
    options: dict[str, Any] = {"at_end": "wrap", "collate_fn": _collate}
    found, state = run(monkeypatch, stream, _plan(dp[0]), steps=3, **options)
    rest, _ = run(monkeypatch, stream, _plan(dp[1]), state=state, **options)
    before = _flat(found)
    assert len(set(before)) == len(before) == sum(state["shards"].values()) == 3 * BATCH
    counts = Counter(before + _flat(rest))
    assert set(counts) == set(range(sum(SHARDS)))


def test_a_shuffled_stream_gives_each_sample_once(monkeypatch: Any) -> None:
    stream = _stream().shuffle(seed=3, buffer_size=8)
    options: dict[str, Any] = {"at_end": "wrap", "collate_fn": _collate}
    found, state = run(monkeypatch, stream, _plan(2), steps=3, **options)
    rest, _ = run(monkeypatch, stream, _plan(3), state=state, **options)
    before = _flat(found)
    assert len(set(before)) == 3 * BATCH
    assert set(before + _flat(rest)) == set(range(sum(SHARDS)))
    assert before != sorted(before)


def test_a_table_is_read_by_its_samples(monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"number": list(range(5 * BATCH))})
    options: dict[str, Any] = {"at_end": "drop", "collate_fn": _collate, "shuffle": True}
    whole, _ = run(monkeypatch, table, _plan(1), **options)
    found, state = run(monkeypatch, table, _plan(2), steps=2, **options)
    rest, _ = run(monkeypatch, table, _plan(4), state=state, **options)
    assert found + rest == whole
    assert sorted(_flat(whole)) == list(range(5 * BATCH))
