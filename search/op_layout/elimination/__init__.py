"""A block problem solved exactly, by eliminating its variables one by one.

Comes in: a `BlockProblem`. Goes out: the cheapest choice, or, of a block that is too wide, a bound
below it (`decompose`). Read `tables`, `ordering` (which variable is next), then `eliminate`.
"""
