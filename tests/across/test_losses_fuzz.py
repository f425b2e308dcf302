"""N1: random losses; parts of a batch train as the whole does, or the plan is told or refused."""

from __future__ import annotations

import gc
import warnings
from collections import Counter

import pytest

from tests.across.loss_cases import Verdict, judge, judged_on_rank
from tests.across.random_losses import HEADER, random_program
from tests.spawn import run_ranks

QUICK, ALL, CHUNK = 100, 1_000, 50
"""Programs of the quick tests and of the slow ones, and those of one test."""
ON_RANKS = 12
"""Programs of one test on two ranks."""


def judged(seeds: range) -> list[Verdict]:
    """Judge programs; what the tests hold before is left alone by the collector, which takes long
    over what a capture leaves.
    """
    gc.collect()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of odd losses
            return [judge(random_program(seed)) for seed in seeds]
    finally:
        gc.unfreeze()


def check(verdicts: list[Verdict]) -> None:
    """No fault; and most programs are trained, exactly or with a word."""
    faults = [verdict for verdict in verdicts if verdict.is_fault]
    programs = "\n\n".join(
        f"{verdict}\n{verdict.program.source.removeprefix(HEADER)}" for verdict in faults[:5]
    )
    count = Counter(verdict.kind for verdict in verdicts)
    told = "\n".join(map(str, faults))
    assert not faults, f"{dict(count)}\n{told}\n\n{programs}\nAll begin with\n{HEADER}"
    assert count["equal"] > len(verdicts) / 10
    assert count["refused"] + count["void"] < len(verdicts) / 3


def _chunks(start: int, stop: int) -> list[range]:
    return [range(first, min(first + CHUNK, stop)) for first in range(start, stop, CHUNK)]


@pytest.mark.parametrize("seeds", _chunks(0, QUICK), ids=str)
def test_random_losses(seeds: range):
    check(judged(seeds))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seeds", _chunks(QUICK, ALL), ids=str)
def test_random_losses_by_the_hundred(seeds: range):
    check(judged(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 48, ON_RANKS))
def test_random_losses_on_two_ranks(first: int):
    """Two replicas, which share a microbatch, or two stages with two."""
    found = run_ranks(judged_on_rank, 2, range(first, first + ON_RANKS))[0]
    silent = [verdict for verdict in found if verdict[1] == "silent"]
    assert not silent, "\n".join(f"{each}\n{random_program(each[0]).source}" for each in silent)
    assert Counter(verdict[1] for verdict in found)["equal"] > 1
