"""One training step: a global batch in, a loss out, parameters updated.

Read `engine` first, then `executor` (the job table, executed), `feeder`, `agreement` and `feed`
(from whole batches or own parts to microbatches), `wiring`, `routes` and `p2p` (tensors between
stages), `trained`, `reduce` and `clip` (gradients and update).
"""
