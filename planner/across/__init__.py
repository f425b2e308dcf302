"""What a model computes across the samples of a batch, derived from its graph.

A plan cuts the batch over microbatches and replicas, and averages losses and gradients of the
parts. That is training on the whole batch if the loss is a mean over samples each of which is
computed alone. Every op is followed to see whether it is so: `state` says what a tensor can be
along its samples, `ops` what ops make of it, mostly by the sharding rules and for ops without
one by those of `extra`; `order` follows rows that are sorted and put back; `walk` goes through
a model. Free of torch.
"""

from planner.across.ops import Kind
from planner.across.walk import Finding, across_samples, blocks_across_samples

__all__ = ["Finding", "Kind", "across_samples", "blocks_across_samples"]
