"""Placements of ops inside one block class on one mesh axis.

In: a bound program of a block class and prices (`block_build`, `block_prices`). Out: layouts that
are fastest, or leanest, with a bound (`layouts`, by `eliminate`, or `decompose` where a block is
too wide). The problem itself is `block_problem`.
"""
