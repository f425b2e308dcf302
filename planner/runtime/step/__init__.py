"""One training step: a global batch in, a loss out, parameters updated.

Read `engine` first, then `stages` (a rank's stages are made), `executor` (the job table, executed),
`inputs` (from whole batches or own parts to microbatches), `messages` (tensors between stages),
`trained`, `reduce` and `clip` (gradients and update).
"""
