"""Integer and linear programs by OR-tools and HiGHS, one model a file.

`block_ilp` places the ops of a block, `joint` cuts stages with recompute and memory, `block_lp`
bounds blocks that are too wide for elimination, `cpsat` runs a solver to a proof.
"""
