"""M24: what a plan puts on the host is off the device, to the byte, in the memory ledger."""

from __future__ import annotations

import pytest

from planner.language.lowering.defaults import default_plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule.timing.offloads import offloads_of
from planner.runtime.proofs.dryrun import dry_run
from tests.builders import MlpWithTarget, PlainGPT
from tests.runtime.scenarios import capture
from tests.runtime.test_host_activations import with_offload
from tests.runtime.test_state_bytes import (
    COUNTERS_BYTES,
    LOSS_WEIGHTS_BYTES,
    NUM_PARAMS,
    graph,
    plan_for,
)


@pytest.mark.parametrize(
    ("precision", "zero_stage", "device_bytes", "host_bytes"),
    [
        # bf16 weight and fp32 gradient, a third of 18; copy and moments, and slots for both
        # gradients and weights on their way
        ("bf16", 0, 2 + 4, (4 + 8) + (4 + 2)),
        ("model", 0, 4 + 4, (4 + 8) + (4 + 4)),
        # With ZeRO nothing but the batch rests on the device: shards, gradients, moments.
        *[("bf16", zero_stage, 0, (4 + 4 + 8) / 2) for zero_stage in (1, 2, 3)],
        ("model", 3, 0, (4 + 4 + 8) / 2),
    ],
)
def test_state_on_the_host_by_formula(precision, zero_stage, device_bytes, host_bytes):
    plan = plan_for(zero_stage, precision).model_copy(update={"optimizer_on_host": True})
    run = dry_run(plan, graph(precision), MlpWithTarget)
    slack = 6 * 64 * 2  # each of the six tensors in a slot begins at a multiple of 64 bytes
    # An fp32 scalar for each tensor stands for its copy, where gradients are summed.
    stand_ins = 6 * 4 if (precision, zero_stage) == ("bf16", 0) else 0
    held = run.rest_bytes - run.batch_bytes
    assert held == device_bytes * NUM_PARAMS + LOSS_WEIGHTS_BYTES + stand_ins
    least = host_bytes * NUM_PARAMS + COUNTERS_BYTES
    assert least <= run.host_rest_bytes <= least + (0 if zero_stage else slack)


def test_activations_that_wait_are_on_the_host_only():
    """After each forward, the device holds those that have not left; the host the others."""
    choices = {"pp": 2, "num_microbatches": 6, "schedule": "fthenb"}
    plan = default_plan(capture("gpt"), **choices)
    stays = dry_run(plan, capture("gpt"), PlainGPT)
    leaves = dry_run(with_offload(plan), capture("gpt"), PlainGPT)
    kept = stays.samples[1].end_bytes - stays.samples[0].end_bytes
    assert kept > 50_000
    found = offloads_of(schedule_of(plan).jobs[0], {0})
    for position in range(6):
        there, here = leaves.samples[position], stays.samples[position]
        # (What leaves during a job is there until the job has ended.)
        assert here.end_bytes - there.end_bytes == kept * sum(t.is_away(position) for t in found)
        assert there.host_bytes == kept * sum(t.is_on_host(position) for t in found)
    assert leaves.peak_bytes < stays.peak_bytes - 2 * kept
    assert stays.host_peak_bytes == leaves.host_rest_bytes == 0
