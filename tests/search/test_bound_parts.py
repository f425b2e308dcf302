"""What bounds are made of, by hand arithmetic: copies, exchange, shares, activations in flight."""

from types import SimpleNamespace

import numpy as np
import pytest

from costmodel import StageLoad
from costmodel.execution import find_execution
from costmodel.memory.bound import OnHost
from planner.language.layout.axes import Degrees
from planner.language.schedule import JobKind, build_schedule
from planner.language.schedule.timing.offloads import offloads_of
from search import SearchRequest
from search.bounds.catalogue import one_microbatch, share_of_work
from search.bounds.copied_jobs import CopiedRow, extra_s, seconds_by_kind
from search.bounds.exchange import LeastExchange
from search.candidates import Candidates
from search.space.configuration import Configuration, Pipeline
from search.space.job_tables import copied_rows
from search.stages.rank_stages import RankStages, rank_bound
from tests.search.machine import Machine
from tests.search.test_bounds import captured


def test_copies_lengthen_the_jobs_that_are_shorter():
    """F0 F1 F2 F3 B0 B1 B2 B3: what F i keeps leaves beside job i + 1 and returns beside job i + 3,
    so a copy of 5 s lengthens F1, F2, F3 (3 s each) by 2 s and B0, B1, B2 (4 s each) by 1 s."""
    row = build_schedule("fthenb", pp=2, vpp=1, num_microbatches=4).jobs[0]
    copied = CopiedRow.of(row, offloads_of(row, [0]))
    job_s = {kind: [s] for kind, s in seconds_by_kind(3.0, 4.0, 0.0).items()}
    assert job_s[JobKind.FORWARD] == [3.0]
    assert extra_s(copied.whole, job_s, [5.0], [5.0]) == 3 * 2.0 + 3 * 1.0
    assert extra_s(copied.whole, job_s, [2.0], [2.0]) == 0.0
    # Between the first forward and the first backward are F1, F2 and F3.
    assert extra_s(copied.filling, job_s, [5.0], [5.0]) == 3 * 2.0
    assert copied_rows(Pipeline("fthenb", 2, 1, 4))[0] == copied


def test_some_rank_does_its_share():
    """2 microbatches of 3 s and 4 s once, on 2 ranks: 5 s."""
    costs = SimpleNamespace(
        microbatch_s=lambda config: 3.0,
        exchange=lambda config: SimpleNamespace(once_s=lambda pp: 4.0),
        early_sends=lambda config: SimpleNamespace(after_first_s=0.5),
    )
    config = SimpleNamespace(num_microbatches=2, pp=2)
    assert share_of_work(costs, config) == 5.0
    assert one_microbatch(costs, config) == 2.5
    assert one_microbatch(costs, SimpleNamespace(num_microbatches=2, pp=1)) == 3.0


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_no_stages_exchange_less(zero, pp):
    """X1: what replicas exchange in and after jobs, of random boundaries."""
    request = SearchRequest(num_devices=8, global_batch=16)
    candidates = Candidates.of(captured("gpt"), Machine(devices_per_node=4), request)
    table = candidates.tables(1, 1)[0]
    config = Configuration(
        degrees=Degrees(dp=8 // pp), pp=pp, vpp=1, microbatch_size=1, num_microbatches=2 * pp,
        schedule="1f1b", zero=zero, recompute="none",
    )  # fmt: skip
    least = LeastExchange(table=table, configuration=config)
    ranks = RankStages(table=table, configuration=config)
    rng = np.random.default_rng(zero)
    for _ in range(20):
        inner = np.sort(rng.choice(np.arange(1, table.num_blocks), pp - 1, replace=False))
        cut = ranks.cut((0, *inner.tolist(), table.num_blocks))
        each = float((cut.exposed.forward_s + cut.exposed.backward_s).sum())
        sizes = zip(*(figures.tolist() for figures in cut.runs.params), strict=True)
        once = float(cut.after_s.sum()) + sum(ranks.prices.update_s(*size) for size in sizes)
        if zero == 3:
            assert 0 < least.each_s(pp) <= each * (1 + 1e-9)
        else:
            # What is exchanged once a step may be counted with a job.
            once += each
            assert least.each_s(pp) == 0.0
        assert 0 < least.once_s(pp) <= once * (1 + 1e-9)


@pytest.mark.parametrize(("precision", "factor"), [("bf16", 2), ("model", 1)])
def test_the_bytes_of_a_rank_are_those_of_its_configuration(precision, factor):
    """What the configuration chooses, and how the table's runtime sums gradients and steps."""
    core = find_execution("megatron-core")
    table = SimpleNamespace(
        profile=Machine(),
        precision=precision,
        on_host=OnHost(optimizer=True),
        costs=SimpleNamespace(execution=core, profile=Machine(), once=lambda _, make: make()),
    )
    config = SimpleNamespace(num_microbatches=8, zero=1, degrees=Degrees(dp=4))
    load = StageLoad(param_bytes=100.0)
    bound = rank_bound(table, config, load, "full")
    assert (bound.load, bound.num_microbatches, bound.recompute) == (load, 8, "full")
    ranks = bound.ranks
    assert (ranks.replicas, ranks.zero_stage, ranks.precision) == (4, 1, precision)
    assert (ranks.optimizer_on_host, bound.activations_on_host) == (True, False)
    assert ranks.runtime_copies == core.copies_update
    assert ranks.sum_factor == core.sum_factor(precision) == factor
    assert rank_bound(table, config, load).recompute == "none"
