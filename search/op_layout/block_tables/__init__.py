"""A block class's choice of placements as numbers.

Comes in: a bound program and prices of its ops and redistributions. Goes out: a `BlockProblem`.
Read `block_problem` first (variables, reshard edges), then `op_signatures` and `reshard_edges`
(equal ops, and equal meetings of placements, are worked out once), `segments`, `block_prices` and
`block_build`.
"""
