"""Bytes of a rank at its worst moment.

In: a plan's stages and its job table. Out: peak bytes in named parts. `plan_memory` walks the jobs
of each rank (`rank_walk`) over its stages (`stage_bytes`, `stage_jobs`), whose blocks' bytes are
in `ops`.
"""
