"""One training step: a global batch in, a loss out, parameters updated.

Read `engine` first, then `executor` (the job table, executed), `feed` (microbatches), `wiring`,
`routes` and `p2p` (tensors between stages), `trained`, `reduce` and `clip` (gradients and update).
"""
