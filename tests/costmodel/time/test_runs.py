"""Runs of blocks taken out of a chain at once are what joining their blocks one by one gives."""

from functools import reduce

import numpy as np
import pytest

from costmodel.time.stage_costs.load import LOAD_FIELDS, StageLoad
from costmodel.time.stage_costs.replicas import distinct
from costmodel.time.stage_costs.runs import RunLoads

FROZEN = ("frozen_bytes", "frozen_param_bytes", "frozen_backward_bytes")
SUMS = ("param_bytes", "num_params", *FROZEN, "spread_bytes", "num_spread", "narrow_bytes")


def joined(first: StageLoad, second: StageLoad) -> StageLoad:
    """The rule of `load`: a run followed by another."""
    columns = {name: getattr(first, name) + getattr(second, name) for name in SUMS}
    for name in ("side_bytes", "largest_param_bytes"):
        columns[name] = max(getattr(first, name), getattr(second, name))
    for saved in ("input_bytes", "selective_bytes"):
        columns[saved] = getattr(first, saved) + getattr(second, saved)
    # The first run's last outputs are the second's saved inputs: one tensor.
    before = first.saved_bytes - min(first.tail_bytes, second.saved_bytes)
    columns["saved_bytes"] = before + second.saved_bytes
    return StageLoad(tail_bytes=second.tail_bytes, **columns)


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 9])
def test_runs_are_what_joining_their_blocks_gives(num_blocks):
    """Sums, shared outputs and the rest, of every run of chains of random blocks; what the
    first and the last block share counts once in the run of both."""
    n = num_blocks
    rng = np.random.default_rng(3)
    columns = {name: rng.integers(1, 100, n).astype(float) for name in LOAD_FIELDS}
    blocks = [StageLoad(**{k: float(v[i]) for k, v in columns.items()}) for i in range(n)]
    trained = {"param_bytes": 3.0, "num_params": 2.0}
    frozen = dict(zip(FROZEN, (5.0, 4.0, 1.0), strict=True))
    runs = RunLoads(
        blocks=StageLoad(**columns),
        ties=((0, n - 1, trained), (0, n - 1, frozen)) if n > 1 else (),
    )
    tied = trained | frozen
    starts, ends = np.array([(i, j + 1) for i in range(n) for j in range(i, n)]).T
    loads = runs.loads(starts, ends)
    for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        expected = reduce(joined, blocks[start:end])
        for name in LOAD_FIELDS:
            less = tied.get(name, 0.0) if n > 1 and (start, end) == (0, n) else 0.0
            got = getattr(loads, name)[at]
            assert got == pytest.approx(getattr(expected, name) - less), (name, start, end)


def test_runs_that_cost_the_same_are_told_once():
    sizes = np.array([[3.0, 5.0, 3.0], [8.0, 8.0, 9.0]])
    rows, which = distinct(sizes, np.ones_like(sizes), 2 * sizes)
    assert sorted(map(tuple, rows)) == [(3, 1, 6), (5, 1, 10), (8, 1, 16), (9, 1, 18)]
    assert np.array_equal(rows[which][..., 0], sizes)
