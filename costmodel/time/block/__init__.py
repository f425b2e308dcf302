"""Seconds of a block on one rank, and of what brings its inputs to it.

In: a local program, a profile, an execution. Out: seconds forward and backward, with the bytes that
the walk of memory needs. Read in this order: `compute` (one op, one collective), `profiled_times`
(a block in our runtime; in others `costmodel.execution.executed_program`), `program` (the price of
a block) and `boundary` (redistributions between blocks).
"""
