"""Placements of ops inside one block class on one mesh axis.

Comes in: a bound program of a block class and prices of its ops and redistributions. Goes out:
layouts that are fastest, or leanest, with what is proved of them. Read in this order:

- `block_tables`: the choice as numbers, and how a program becomes one;
- `elimination` solves it exactly, `search.ilp` by integer and linear programs;
- `solve` takes the first that suits; `front` finds the corners between fast and lean;
- `boundaries` has what ties blocks to each other, `layouts` does all of it for a model.
"""
