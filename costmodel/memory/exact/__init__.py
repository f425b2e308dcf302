"""The higher fidelity: what is alive on a rank, job by job.

In: a plan, its job table and the bytes of its blocks (`costmodel.memory.block`). Out: the parts of
each rank's fullest sample, to the byte of what the runtime holds on a CPU.

Reading order: `plan_memory` (a plan's ranks), `resident` (what lies there through the step),
`rank_walk` (one rank's jobs in order), `microbatch` (what one microbatch keeps between its jobs),
`messages` (what travels between ranks), `fsdp_walk` (ZeRO), and the sub-room `stage` (one job,
block by block).
"""
