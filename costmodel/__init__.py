"""What a training step takes, predicted: pure functions of a graph, a profile and a plan.

`estimate` is the front door: time and memory in named parts. Below it, each usable alone:
`execution.executed_program` prices a block on one rank, `StageCosts` any run of blocks,
`planner.language.schedule.simulate` runs a job table, `memory.exact` and `memory.bound` count
bytes. None of it loads torch. `CostCache` computes each expensive answer once: a search needs them
thousands of times a second.
"""

from costmodel.cache import CostCache
from costmodel.estimate import Estimate, estimate
from costmodel.time.plan_price import PlanPrice
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.stage_costs import StageCosts

__all__ = [
    "CostCache",
    "Estimate",
    "PlanPrice",
    "StageCosts",
    "StageLoad",
    "estimate",
]
