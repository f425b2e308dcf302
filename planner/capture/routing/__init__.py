"""Rows sorted by their experts, multiplied run by run and put back: told in three ops of ours.

Comes in: the ops of a captured model, with routing as libraries and users write it: a sort, numbers
of rows made of its order, counts, sums over the copies of a row. Op by op these cannot be cut by
rows. Goes out: ops that compute the same, where it is recognised, by `sort_rows`, `bias_of_runs`
and `unsort_rows` (`planner.language.ops.families.entries.routing`).

- `values` are what is known of a value: an order, rows in this order, ends of runs;
- `follow` goes through the ops and says what is known of what each makes;
- `rewrite` takes the sorts of which nothing is used that it does not know, and replaces where rows
  are taken, biased and put back. What made the rest is then used by nothing, and is left out.
"""

from planner.capture.routing.rewrite import with_told_routing

__all__ = ["with_told_routing"]
