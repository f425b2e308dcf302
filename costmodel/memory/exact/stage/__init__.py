"""One stage of a plan: what its jobs hold, the same for every microbatch that runs the same way.

In: a stage's blocks with their layouts, and the values that cross its ends. Out: `jobs.StageJobs`:
its forward and backward jobs, block by block, and the messages it takes and sends.

Reading order: `placed_block` (a block, its names and layout changes), `blocks` (a stage's blocks
and the values between them), `walk` (the forward job), `backward` (the backward job), `jobs` (the
variants of a stage's jobs), `fsdp_units` (parameters under ZeRO), `placed_stage` (all of it from
a plan).
"""
