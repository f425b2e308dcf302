"""Copies in host memory: where they lie, and when their sources may change."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from planner.runtime.checkpoint import staging
from planner.runtime.checkpoint.staging import Copies, Staging

CPU = torch.device("cpu")


@pytest.fixture
def small_slabs(monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 256)


def sources() -> list[torch.Tensor]:
    """Of many dtypes; a number, none, one that is larger than a slab, one of mixed strides."""
    return [
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.arange(300.0),
        torch.arange(12.0).view(3, 4).T,
        torch.tensor([True, False, True]),
        torch.complex(torch.ones(3), torch.full((3,), 2.0)),
    ]


@pytest.mark.usefixtures("small_slabs")
def test_copies_are_what_the_sources_were_and_share_no_byte():
    store = Staging(CPU)
    for _ in range(2):  # the second time in the memory of the first
        given = sources()
        copies = store.begin(given)
        copies.finish()
        for tensor in given:
            tensor.zero_()
        for copy, expected in zip(copies.tensors, sources(), strict=True):
            assert copy.dtype == expected.dtype
            assert torch.equal(copy, expected)
            assert copy.is_contiguous()
            assert copy.data_ptr() % 64 == 0
        held = [slab.data_ptr() for slab in store._slabs]
    assert [slab.numel() for slab in store._slabs] == [256, 1200, 256]
    store.begin(sources()[:2])
    assert [slab.data_ptr() for slab in store._slabs] == held


def test_sources_change_only_after_they_were_copied():
    source = torch.ones(4)
    copies = Staging(CPU).begin([source])
    events = []

    def step() -> None:
        copies.hold()
        events.append("stepped")
        source.zero_()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.05)
    events.append("copied")
    copies.finish()
    thread.join(5)
    assert events == ["copied", "stepped"]
    assert torch.equal(copies.tensors[0], torch.ones(4))


def test_a_copy_that_fails_does_not_stop_the_training():
    copies = Staging(CPU).begin([torch.ones(4)])
    copies._later = [(torch.ones(4), torch.ones(3))]
    with pytest.raises(RuntimeError, match="size of tensor"):
        copies.finish()
    copies.hold()  # returns


class Event:
    """Of copies on a stream of their own: done when it is waited for."""

    def __init__(self, held: Callable[[], bool]) -> None:
        self._held = held
        self.held_when_done: bool | None = None

    def synchronize(self) -> None:
        self.held_when_done = self._held()


def test_sources_live_until_a_stream_has_copied_them():
    """A copy of a buffer that is freed before is overwritten by the next step's kernels."""
    sources = [torch.ones(4)]
    alive = weakref.ref(sources[0])
    event = Event(lambda: alive() is not None)
    copies = Copies([torch.empty(4)], sources, [], event, CPU)  # type: ignore[arg-type]
    del sources
    gc.collect()
    copies.finish()
    assert event.held_when_done
    assert alive() is None
