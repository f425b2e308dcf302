"""One training step: a global batch in, a loss out, parameters updated.

Read `engine` first, then `build` and `stages` (what a rank holds is made), `executor` (the job
table, executed), `messages` (tensors between stages) and `update` (from gradients to weights).
`evaluation`, `intermediates` and `returned` are what else a forward is good for.
"""
