"""What a model computes across the samples of a batch, derived from its graph.

A plan cuts the batch over microbatches and replicas, and adds up losses and gradients of the
parts. That is training on the whole batch if the loss is a function of sums over samples, each of
which is computed alone, that parts can take their share in. Every op is followed to see whether it
is so. In: a `ModelGraph`. Out: `Finding`s, the ops by which the loss of a batch does not follow
from its parts; what each part counts for in the loss; and a graph whose parts take from the whole
batch what can be made of it before a step. Free of torch.

Read `state` (what a tensor can be along its samples), `step` (one op with the states of its
inputs), `by_rules` (most ops: by the rules in their records of `planner.language.ops`), then the
handlers of what rules do not say: `sums` (over samples, and their shares), `rows` (made, repeated,
taken), `order` and `take_and_put` (rows sorted and put back), `losses` and `buffers`. `follow` goes
through a program with these, `walk` through a model; `whole` makes the graph and says what parts
count; `gathers` runs ops that compute across samples on the whole batch of all replicas.
"""

from planner.language.across import handlers  # noqa: F401 - handlers register themselves
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
