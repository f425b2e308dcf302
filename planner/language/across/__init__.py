"""What a model computes across the samples of a batch, derived from its graph.

A plan cuts the batch over microbatches and replicas, and adds up losses and gradients of the
parts. That is training on the whole batch if the loss is a function of sums over samples, each of
which is computed alone, that parts can take their share in. Every op is followed to see whether it
is so. In: a `ModelGraph`. Out: `Finding`s, the ops by which the loss of a batch does not follow
from its parts; what each part counts for in the loss; and a graph whose parts take from the whole
batch what can be made of it before a step. Free of torch.

Read `planner.language.ops.samples` (what a tensor can be along its samples, one op with the states
of its inputs), then `by_rules` (most ops: by the rules in their records) and `sums` (over samples,
and their shares); what rules do not say of an op is a handler in the file of its family. `follow`
goes through a program with these, `walk` through a model; `whole` makes the graph and says what
parts count. No op has a name here but those that `whole` and `cut` put into a graph.
"""

from planner.language.across.walk import (
    Finding,
    across_samples,
    blocks_across_samples,
    follows_from_parts,
    runs_of_samples,
)
from planner.language.across.whole import LossShares, loss_shares, with_whole_values

__all__ = [
    "Finding",
    "LossShares",
    "across_samples",
    "blocks_across_samples",
    "follows_from_parts",
    "loss_shares",
    "runs_of_samples",
    "with_whole_values",
]
