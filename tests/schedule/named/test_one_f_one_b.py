"""1F1B: as many forwards first as fit in the way to the last rank and back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner.language.schedule.jobs import JobKind
from planner.language.schedule.named.one_f_one_b import eager_1f1b, one_f_one_b


def warmups(rows) -> list[int]:
    kinds = [[job.kind for job in row] for row in rows]
    return [row.index(JobKind.FULL_BACKWARD) for row in kinds]


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (4, 8), (4, 2)])
def test_warm_up_then_pairs_then_drain(pp, num_microbatches):
    """Rank r of p: p - r forwards first, with room for a transfer 2 (p - r) - 1."""
    for build, first in ((one_f_one_b, lambda after: after), (eager_1f1b, lambda a: 2 * a - 1)):
        rows = build(pp, 1, num_microbatches)
        expected = [min(num_microbatches, first(pp - rank)) for rank in range(pp)]
        assert warmups(rows) == expected
        for row, warmup in zip(rows, expected, strict=True):
            steady = row[warmup : 2 * num_microbatches - warmup]
            assert all(a.kind is not b.kind for a, b in pairwise(steady))
