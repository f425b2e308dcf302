"""Seconds of a plan's parts.

In: local programs, a profile, a plan. Out: when each job of a step runs, and what a step takes in
named parts. Read in this order: `block` (one block, and what brings its inputs); `communication`
(exchange with replicas, transfers); `stage_costs` (any run of blocks as a stage) and `plan_price`
(the stages of a plan), whose jobs `planner.language.schedule.simulate` runs; then what comes once a
step: `inputs`, `tied`, `clipping`, `update`, `offload`, and `step`, which ends the step with them.
`docs/cost-model.md` has every formula with its source.
"""
