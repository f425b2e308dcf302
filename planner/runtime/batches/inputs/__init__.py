"""From what a script gives to the microbatches of each stage.

Comes in: a whole batch, or a replica's own part. Goes out: microbatches, alike on all ranks that
need them. Read `feed`, then `agreement` (what ranks agree on before a step), `feeder`,
`loss_weights` and `whole_batch`.
"""
