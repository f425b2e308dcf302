"""The doctor's two ranks: real ones, and ones that fail or never end."""

from __future__ import annotations

import pytest

from planner.doctor import pair


def test_two_ranks_exchange():
    (found, *_) = pair.check_pair()
    assert found.state == "ok", found
    assert found.found.startswith("exchanged")


def test_a_rank_that_fails_says_its_last_line():
    (found, *_) = pair.check_pair(("-c", "raise SystemExit('no route to host')"))
    assert (found.state, found.found) == ("problem", "no route to host")


def test_ranks_that_never_end_are_ended(monkeypatch):
    monkeypatch.setattr(pair, "LIMIT_S", 0.5)
    (found, *_) = pair.check_pair(("-c", "import time; time.sleep(600)"))
    assert found.found == "they were not through after 0 s"
    assert "NCCL_DEBUG" in found.advice


def test_a_wrong_sum_ends_a_rank(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "all_reduce", lambda values: None)
    with pytest.raises(SystemExit, match="rank 0 got a wrong sum"):
        pair.main("folder", 0, "cpu")
