"""Gradients between the backwards and the update.

In: what backwards left on this rank's parameters. Out: the same sums on all replicas. Read `reduce`
(buckets over replicas) first, then `tied` (copies of a parameter on several stages), `clip` (the
norm of the whole model), `reached` (parameters that no sample reached) and `loss_scale` (what the
loss of precision "fp16" is multiplied by).
"""
