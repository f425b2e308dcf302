"""Seconds of a block on one rank, and of what brings its inputs to it.

In: a local program, a profile, an execution. Out: seconds forward and backward. Read in this order:
`compute` (one op, one collective), `beside` (weight gradients that a collective hides behind),
`program` (a block in our runtime; `costmodel.execution` has those of others, and picks) and
`boundary` (redistributions between blocks).
"""
