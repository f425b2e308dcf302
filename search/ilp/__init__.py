"""Integer and linear programs, all by OR-tools, one model a file: `joint` cuts a chain into stages
with recompute and memory (`solver` ilp, CP-SAT); `block_lp` places the ops of blocks too wide for
elimination (GLOP, and SCIP where its optimum is not whole).
"""
