"""What a plan that cuts the batch does about what the model computes across its samples.

In: findings of `planner.language.across`, and a plan. Out: the graph that runs under that plan, or
a refusal by name. Read `whole_batch` first, then `batch_statistics` (BatchNorm) and `moved_once`
(buffers that move once for a batch).
"""
