"""Where tensors lie, and what brings them from one place to another.

In: a program and placements of its tensors on mesh axes. Out: the program that each rank runs.
Read `axes` first (the table of mesh axes), then `placement` (one axis), `placements` (all axes
that blocks are lowered on), `layout` (any mesh), `redistribution` (on one axis, and between any two
meshes), `propagate` and `beam` (placements without a solver),
`sequences` and `pins` (what an axis of sequences and a user's pins demand), `class_layout` (what a
plan stores of it), then `lowering`.
"""
