"""The end of a step, by hand: two ranks, what they do once, and which of them ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel import CostCache
from costmodel.time.clipping import ClipSeconds
from costmodel.time.offload import copy_seconds
from costmodel.time.step import OnceAStep, copies_beside_jobs
from costmodel.time.update import RankUpdate
from planner.language.schedule.timing.job_table import job_table
from tests.costmodel.memory.plans import gpt_graph
from tests.search.machine import Machine


def update(optimizer_s: float, norm_s: float, scale_s: float) -> RankUpdate:
    clip = ClipSeconds(norm_s=norm_s, scale_s=scale_s)
    return RankUpdate(optimizer_s=optimizer_s, clip=clip)


ONCE = OnceAStep(
    inputs_s=0.5,
    exchange_s=(1.0, 2.0),
    tied_s=(0.25, 0.0),
    updates=(update(4.0, 0.5, 0.25), update(2.0, 0.5, 0.25)),
    norm_sum_s=None,
)


def test_the_rank_that_ends_last_makes_the_step():
    """Rank 0: 10 + 1.25 + 4 = 15.25 s, rank 1: 11 + 2 + 2 = 15 s; 0.5 s of inputs before."""
    last = ONCE.last_rank((10.0, 11.0))
    assert (last.end_s, last.after_s, last.optimizer_s, last.clipping_s) == (10.0, 1.25, 4.0, 0.0)
    assert last.step_s == 15.75
    assert ONCE.update_starts((10.0, 11.0)) == [11.25, 13.0]


def test_clipping_makes_all_wait_for_the_last_gradients():
    """Rank 1 has its norm at 11 + 2 + 0.5 s; after 0.125 s of their sum both scale and update,
    rank 0 longest: 0.25 + 4 s."""
    clipped = replace(ONCE, norm_sum_s=0.125)
    assert clipped.last_rank((10.0, 11.0)).step_s == 0.5 + 13.5 + 0.125 + 4.25
    assert clipped.update_starts((10.0, 11.0)) == [13.875, 13.875]


def test_copies_lie_beside_the_jobs_of_stages_that_have_any():
    """Rank 0 runs F0 to F3, B0 to B3: microbatch i leaves beside job i + 1, and is back beside
    i + 3."""
    costs = CostCache(gpt_graph(), Machine())
    table = job_table("fthenb", 2, 1, 4)
    assert copies_beside_jobs([costs] * 2, table, {}) is None
    first, second = copies_beside_jobs([costs] * 2, table, {0: 1e9})
    assert not second.any()
    copied_s = copy_seconds(costs.profile, 1e9, to_host=True)
    assert first.tolist() == pytest.approx([0.0, *(copied_s,) * 6, 0.0])
