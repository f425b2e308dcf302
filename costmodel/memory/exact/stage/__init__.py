"""One stage of a plan: what its jobs hold, the same for every microbatch that runs the same way.

In: a stage's blocks with their layouts, and the values that cross its ends. Out: `jobs.StageJobs`:
its forward and backward jobs, block by block, and the messages it takes and sends.

Reading order: `stage_walk` (a stage's blocks, the values between them, and the forward job),
`backward` (the backward job), `fsdp_units` (parameters under ZeRO), `jobs` (the variants of a
stage's jobs), `placed_stage` (all of it from a plan).
"""
