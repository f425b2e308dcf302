"""Referees: slow programs that solve a small problem a second way, to hold the product against.

`cuts` tries every cut of a chain, `blocks` every choice of placements in a block, `plans` every
plan of a small search space, `schedules` finds the best job table of a small pipeline by CP-SAT,
`batches` runs a module on a whole batch and on its parts. Nothing of the product imports them.
"""
