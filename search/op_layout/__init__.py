"""Placements of ops inside one block class on one mesh axis.

Comes in: a bound program of a block class and prices of its ops and redistributions. Goes out:
layouts that are fastest, or leanest, with what is proved of them. Read in this order:

- `block_problem`: the choice as numbers (variables, reshard edges);
- `op_signatures`, `reshard_edges`, `segments`, `block_prices`, `block_build`: how a program becomes
  one; equal ops, and equal meetings of placements, are worked out once;
- `tables`, `ordering`, `eliminate` solve it exactly; `search.ilp` by integer and linear programs;
  `decompose` bounds a block that is too wide for both;
- `solve` takes the first that suits; `front` finds the corners between fast and lean;
- `boundaries` has what ties blocks to each other, `layouts` does all of it for a model.
"""
