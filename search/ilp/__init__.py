"""Integer and linear programs, all by OR-tools, one model a file.

What comes in is a problem of the search (`BlockProblem`, `ChainProblem`), what goes out its best
choice with what is proved of it. Read in this order:

- `cpsat` runs CP-SAT to a proof: integer programs;
- `block_ilp` places the ops of a block, the second solver beside elimination;
- `block_lp` does so for blocks too wide for elimination: a linear program (GLOP), branched on where
  its optimum is not whole (SCIP);
- `joint` cuts a chain into stages with recompute and memory, with `solver` ilp.
"""
