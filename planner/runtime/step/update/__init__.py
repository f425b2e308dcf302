"""From a batch's gradients to changed weights.

Comes in: gradients of jobs in the stages' parameters, and the loss. Goes out: an update, made on
all ranks or on none. Read `accumulation` (several batches, a single update), `values` (a look for
NaN) and `updates` (sums, clip, look, optimizer and schedulers, in order).
"""
