"""What a model computes across the samples of a batch, derived from its graph.

A plan cuts the batch over microbatches and replicas, and averages losses and gradients of the
parts. That is training on the whole batch if the loss is a mean over samples each of which is
computed alone. Every op is followed to see whether it is so. In: a `ModelGraph`. Out: `Finding`s,
the ops by which the result on a batch is not the mean of those on its parts. Free of torch.

Read `state` (what a tensor can be along its samples), `step` (one op with the states of its
inputs), `by_rules` (most ops: by the rules in their records of `planner.ops`), then the handlers
of what rules do not say: `sums` (of samples, and their number), `rows` (made, repeated, taken),
`order` and `take_and_put` (rows sorted and put back), `losses` and `buffers`. `follow` goes through
a program with these, `walk` through a model. `counted` says over which labels a loss is a mean.
"""

from planner.across.counted import blocks_across_samples, uncounted
from planner.across.step import Kind
from planner.across.walk import Finding, across_samples, runs_of_samples

__all__ = [
    "Finding",
    "Kind",
    "across_samples",
    "blocks_across_samples",
    "runs_of_samples",
    "uncounted",
]
