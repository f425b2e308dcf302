"""What a training step takes, predicted: pure functions of a graph, a profile and a plan.

`estimate` is the front door: time and memory in named parts. Below it, each usable alone:
`price_program` prices a block on one rank, `StageCosts` any run of blocks, `simulate` runs a
job table, `plan_memory` and `RankBound` count bytes. All of it is free of torch, and `CostCache`
computes each expensive answer once: a search calls it thousands of times a second.
"""

from costmodel.cache import CostCache
from costmodel.estimate import Estimate, TimeParts, estimate
from costmodel.memory.parts import MemoryParts
from costmodel.time.block.compute import op_seconds, redistribute_seconds
from costmodel.time.block.program import price_program
from costmodel.time.plan_price import PlanPrice, price_plan
from costmodel.time.simulate import JobSeconds, Timeline, build_job_table, simulate
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.stage_costs import StageCosts

__all__ = [
    "CostCache",
    "Estimate",
    "JobSeconds",
    "MemoryParts",
    "PlanPrice",
    "StageCosts",
    "StageLoad",
    "TimeParts",
    "Timeline",
    "build_job_table",
    "estimate",
    "op_seconds",
    "price_plan",
    "price_program",
    "redistribute_seconds",
    "simulate",
]
