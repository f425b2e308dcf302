"""Tables no builder made run as they are, and compute what one process computes."""

from __future__ import annotations

import random

import torch

from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, StagePlan
from planner.language.schedule import Schedule
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.synthesis.synthesize import Pipeline, synthesize_schedule
from planner.language.schedule.timing.in_flight import in_flight
from planner.language.schedule.timing.job_seconds import JobSeconds
from tests.runtime.scenarios import capture, check_plans
from tests.schedule.tables import random_table


def plan_with(schedule: Schedule) -> Plan:
    """A plan of tiny GPT whose stages and jobs are this table's."""
    graph = capture("deep-gpt", torch.float64)
    num_stages, num_blocks = schedule.num_stages, len(graph.blocks)
    bounds = [num_blocks * s // num_stages for s in range(num_stages + 1)]
    return default_plan(graph).model_copy(
        update={
            "pp": schedule.pp,
            "vpp": num_stages // schedule.pp,
            "num_microbatches": schedule.num_microbatches,
            "schedule": schedule.name,
            "table": tuple(schedule.to_json()["jobs"]),
            "stages": tuple(
                StagePlan(pp_rank=rank, first_block=bounds[s], last_block=bounds[s + 1] - 1)
                for s, rank in enumerate(schedule.stage_to_pp_rank)
            ),
        }
    )


def test_random_and_synthesised_tables_equal_one_process() -> None:
    """G10, P13, P14: any valid table, with I and W anywhere, equals one process."""
    rng = random.Random(4)
    tables = [random_table(rng, pp=2, vpp=vpp, num_microbatches=4) for vpp in (1, 2)]
    uneven = Pipeline(
        stage_to_pp_rank=fold_placement(2, 2),
        num_microbatches=5,
        times=JobSeconds.of_stages(
            forward_s=(1.0, 2.0, 1.0, 3.0),
            backward_input_s=(1.0, 2.0, 1.0, 3.0),
            backward_weight_s=(1.0, 1.0, 1.0, 2.0),
            transfer_s=0.3,
        ),
        live_bytes=(1.0,) * 4,
        limit_bytes=(5.0, 4.0),
    )
    made = synthesize_schedule(uneven).schedule
    assert all(live <= limit for live, limit in zip(in_flight(made), (5, 4), strict=True))
    check_plans(2, [("deep-gpt", plan_with(schedule)) for schedule in (*tables, made)])
