"""Bytes of a rank: one memory model with two fidelities.

In: a plan's stages, what their blocks save, and the job table. Out: peak bytes of each rank in
named parts (`parts.MemoryParts`), or a lower bound of them.

- `exact` walks a rank's jobs in order and tracks what is resident: `estimate` takes its memory
  from it, and the dry run (`planner.runtime.proofs.dryrun`) is its reference oracle.
- `bound` is a closed form that never exceeds it, for stages that have no job table yet: the
  search prunes by it.

Reading order: `bound` (the whole story in one formula), `parts`, `part_table` (what is resident
between jobs: both fidelities read it), then `exact` from the outside in, `block` (one program, op
by op) and `saved` (what each op saves and allocates).
"""
