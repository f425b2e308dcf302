"""Folded chunks: breadth first, and oldest microbatch first."""

from __future__ import annotations

from planner.language.schedule.named.fold import fold_all_in_all_out, fold_first_in_first_out


def test_breadth_first_runs_every_chunk_to_its_end():
    rows = fold_all_in_all_out(2, 2, 2)
    assert " ".join(map(str, rows[0])) == "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1"
    assert " ".join(map(str, rows[1])) == "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1"


def test_a_rank_serves_the_oldest_microbatch_that_is_there():
    """A younger one enters where the rank would idle: 0F1, 0F2; once 0 is back, it goes first."""
    rows = fold_first_in_first_out(2, 2, 4)
    assert " ".join(map(str, rows[0])).startswith("0F0 0F1 0F2 3F0 3B0")
    assert " ".join(map(str, rows[1])).startswith("1F0 2F0 1F1 2F1")
