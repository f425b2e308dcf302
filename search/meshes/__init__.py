"""Stages whose pp ranks have meshes of their own (``meshes="own"``), as problems.

In come configurations of equal cp, pp and microbatches with their stage tables (`Member`); out come
a chain problem in which each stage chooses a mesh (`own_meshes`), a list of the choices of ranks
with several stages, best first (`interleaved_mixes`), and the plan of a solution. The nodes that
use them are in `nodes/meshes` and `nodes/interleaved_meshes`.
"""
