"""Where tensors lie, and what brings them from one place to another.

In: a program and placements of its tensors on mesh axes. Out: the program that each rank runs.
Read `placement` (one axis), `layout` (any mesh), `redistribute` (one axis, which collectives),
`reshard` (between any two meshes), `propagate` and `beam` (placements without a solver), `context`
and `pins` (what an axis of sequences and a user's pins demand), then `lowering`.
"""
