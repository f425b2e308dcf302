"""The ledger counts storages: views once, until the last tensor in them dies, hosts' apart."""

import torch

from planner.capture.modes.ledger import Ledger


def test_storages_count_until_their_last_tensor_dies():
    ledger = Ledger(is_dry=False, copies_to_reduce=False)
    with ledger.watching():
        whole = torch.zeros(4, 8)
        part = whole[1:]
        assert ledger.live_bytes == 128
        with ledger.span("F", "F0.0"):
            more = whole + 1
            del more
        del whole
        assert ledger.live_bytes == 128
        del part
        assert ledger.live_bytes == 0
    (sample,) = ledger.samples
    assert (sample.kind, sample.end_bytes, sample.peak_bytes) == ("F", 128, 256)


def test_bytes_of_the_host_are_counted_apart():
    ledger = Ledger(is_dry=False, copies_to_reduce=False)
    with ledger.watching():
        with ledger.counting_as_host():
            there = torch.zeros(10)
        here = torch.zeros(5)
        assert (ledger.host_bytes, ledger.live_bytes) == (40, 20)
        ledger.move_to_host(here)
        assert (ledger.host_bytes, ledger.live_bytes) == (60, 0)
        del there
        assert ledger.host_bytes == 20
