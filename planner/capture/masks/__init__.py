"""Masks of attention that are positions compared, told to the kernel in a few numbers.

Comes in: the ops of a captured model, with masks [batch, 1, queries, keys] that libraries make
where a model is exported. Goes out: ops that compute the same, without those that are recognised.

- `values` are what is known of a value without its numbers: a place, a comparison of places;
- `follow` goes through the ops and says what is known of what each makes (`compare`: of what two
  values are beside each other);
- `rewrite` gives attention what a kernel takes in the place of a mask. Ops that made it are then
  used by nothing, and cutting the graph leaves them out.
"""

from planner.capture.masks.rewrite import with_told_masks

__all__ = ["with_told_masks"]
