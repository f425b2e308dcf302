"""One microbatch at a time."""

from __future__ import annotations

from planner.language.schedule.named.naive import naive


def test_each_microbatch_comes_back_before_the_next():
    assert [" ".join(map(str, row)) for row in naive(2, 1, 2)] == [
        "0F0 0B0 0F1 0B1",
        "1F0 1B0 1F1 1B1",
    ]
