"""Ranks of a plan in one process: `lockstep` runs them, `block_run` a block on one of them, on
parameters drawn as `windows`; `pieces_of` says what each has of a whole tensor.
"""
