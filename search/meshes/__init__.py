"""Stages whose pp ranks have meshes of their own (``meshes="own"``), as problems.

In come configurations of equal cp, pp and microbatches with their stage tables (`Member`); out come
a chain problem in which each stage chooses a mesh (`own_meshes`; `Mix`: the meshes, and the plan of
a solution) and a list of the choices of ranks with several stages, best first
(`interleaved_mixes`). The nodes that use them are in `nodes/meshes` and `nodes/interleaved_meshes`.
"""
